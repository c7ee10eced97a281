// What memory safety depends on in a masked layer: tensors of a call, checked, as its stages.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "fused_moe/checks.hpp"
#include "fused_moe/masked_layer.hpp"

namespace moe_ext::fused_moe {

/// Arguments of the op. Refers to its own, so it lives no longer than they. Scratch is contiguous, of any shape, with
/// at least so many elements, where rows are those of all buffers:
///   intermediate  BF16, rows * intermediate size
///   quantised     FP8, rows * the larger of hidden and intermediate size, up to a multiple of 16
///   scale         fp32, rows * that size's blocks of 128, the last one short
struct MaskedCall {
  torch::stable::Tensor const& hidden_states;  // (num_experts, max_rows, hidden)
  Experts experts;
  torch::stable::Tensor const& counts;  // (num_experts,)
  std::optional<torch::stable::Tensor> const& a1_scale;
  std::optional<torch::stable::Tensor> const& a2_scale;
  std::optional<torch::stable::Tensor> const& w13_bias;
  std::optional<torch::stable::Tensor> const& w2_bias;
  torch::stable::Tensor const& intermediate;
  std::optional<torch::stable::Tensor> const& quantised;
  std::optional<torch::stable::Tensor> const& scale;
  torch::stable::Tensor const& out;  // as hidden_states
  std::int64_t flags;                // LayerFlag (op.hpp)
};

/// Checks the operands and all sizes. Each row is a token that has chosen one expert.
Form check_masked_form(MaskedCall const& call);

/// Checks the rest of a call whose form has passed, for the kernels that are to run.
MaskedLayer check_masked_layer(MaskedCall const& call, Form const& form, Choice const& choice);

}  // namespace moe_ext::fused_moe
