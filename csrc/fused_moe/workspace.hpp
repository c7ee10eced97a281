// Where the parts of a layer's workspace lie, as the stages that use them want it.
#pragma once

#include <cstdint>

#include <torch/csrc/stable/tensor.h>

#include "fused_moe/gather.hpp"
#include "grouped_gemm/tiling.hpp"

namespace moe_ext::fused_moe {

/// Rows of `columns` values as they are, the first *num_rows of `slots`: everything but what is read, what is written
/// and which rows.
GatherParams make_stage(int const* num_rows, std::int64_t slots, std::int64_t columns);

struct WorkspaceParts {
  int* offs;
  grouped_gemm::ListedRows* listed;
  int* row_slot;
  int* slot_row;
  int* sort_scratch;  // lies where later stages write
  std::int64_t sort_scratch_elems;
  void* intermediate;
  void* rows;
  GatherParams gather;    // everything but what it reads and its format
  GatherParams quantize;  // the same; reads the intermediate
};

/// The parts of a workspace (workspace_layout.hpp), checked to lie within it.
WorkspaceParts check_workspace(torch::stable::Tensor const& workspace,
                               std::int64_t slots,
                               std::int64_t hidden,
                               std::int64_t intermediate,
                               std::int64_t num_experts,
                               bool fp8,
                               bool apart,
                               int device);

}  // namespace moe_ext::fused_moe
