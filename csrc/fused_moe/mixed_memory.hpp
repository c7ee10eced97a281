// Where the parts of a workspace lie in a layer of experts in two precisions.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "fused_moe/checks.hpp"
#include "grouped_gemm/tiling.hpp"

namespace moe_ext::fused_moe {

/// The parts of a workspace (mixed_workspace.hpp), which begin at multiples of kWorkspaceAlignment.
struct MixedMemory {
  int* offs;
  grouped_gemm::ListedRows* listed;
  int* row_slot;
  int* slot_row;
  unsigned char* tokens;
  float* token_scale;
  unsigned char* rows;
  unsigned char* intermediate;
  unsigned char* quantised;
  float* quantised_scale;
};

/// Checks that there is room for all of them, and in `rows` and what is behind it for sorting.
MixedMemory check_memory(torch::stable::Tensor const& workspace, Form const& form);

}  // namespace moe_ext::fused_moe
