// What memory safety depends on, and what the contract asks besides: tensors of a call, checked, as a layer.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "fused_moe/choices.hpp"
#include "fused_moe/layer.hpp"
#include "fused_moe/weight_scale.hpp"

namespace moe_ext::fused_moe {

/// Arguments that all ops have. Refers to the op's own, so it lives no longer than they.
struct Call {
  torch::stable::Tensor const& hidden_states;
  torch::stable::Tensor const& w13;
  torch::stable::Tensor const& w2;
  torch::stable::Tensor const& topk_weights;
  torch::stable::Tensor const& topk_ids;
  std::optional<torch::stable::Tensor> const& w13_scale;
  std::optional<torch::stable::Tensor> const& w2_scale;
  std::optional<torch::stable::Tensor> const& a1_scale;
  std::optional<torch::stable::Tensor> const& a2_scale;
  std::optional<torch::stable::Tensor> const& w13_bias;
  std::optional<torch::stable::Tensor> const& w2_bias;
  std::optional<torch::stable::Tensor> const& expert_map;
  std::optional<torch::stable::Tensor> const& addend;
  std::optional<torch::stable::Tensor> const& workspace;
  std::optional<torch::stable::Tensor> const& out;
  std::int64_t flags;  // LayerFlag and the activation (op.hpp)
  double alpha;
  double limit;
  double routed_scale;
  std::int64_t first_expert;
};

/// What operands say: sizes, and how rows are quantised.
struct Form {
  std::int64_t num_tokens;
  std::int64_t top_k;
  std::int64_t hidden;
  std::int64_t intermediate;
  std::int64_t num_experts;
  bool fp8;
  WeightScale w13_scale;
  WeightScale w2_scale;
  int device;
  int sm_count;

  std::int64_t slots() const {
    return num_tokens * top_k;
  }
};

/// The weights of all experts. Refers to an op's own arguments, so it lives no longer than they.
struct Experts {
  torch::stable::Tensor const& w13;
  torch::stable::Tensor const& w2;
  std::optional<torch::stable::Tensor> const& w13_scale;
  std::optional<torch::stable::Tensor> const& w2_scale;
};

/// What `numbers` of a Choice and `flags` say of gate and up.
grouped_gemm::Gating make_gating(std::array<float, 6> const& numbers,
                                 std::int64_t intermediate,
                                 std::int64_t flags);

/// Checks the operands, all sizes, and the shapes of the weights' scales.
Form check_form(Call const& call);

/// Checks the rest of a call whose form has passed, for the kernels that are to run. `workspace` and `out` are the
/// call's, or made for it; `apart` as workspace_layout has it.
Layer check_layer(Call const& call,
                  Form const& form,
                  Choice const& choice,
                  bool apart,
                  torch::stable::Tensor const& workspace,
                  torch::stable::Tensor const& out);

}  // namespace moe_ext::fused_moe
