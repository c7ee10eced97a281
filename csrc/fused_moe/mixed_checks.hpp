// What memory safety depends on in a layer of experts in two precisions: tensors of a call, checked, as its stages.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "fused_moe/checks.hpp"
#include "fused_moe/mixed_choices.hpp"
#include "fused_moe/mixed_layer.hpp"
#include "fused_moe/mixed_parts.hpp"

namespace moe_ext::fused_moe {

/// Weights of one stage in one precision, in the order of their experts' places. Refers to an op's own arguments, as
/// all below.
struct MixedWeights {
  std::optional<torch::stable::Tensor> const& weight;  // (experts, n, k), absent where there are none
  std::optional<torch::stable::Tensor> const& bias;
};

struct MixedCall {
  torch::stable::Tensor const& hidden_states;
  torch::stable::Tensor const& topk_weights;
  torch::stable::Tensor const& topk_ids;
  torch::stable::Tensor const& places;  // (num_experts,), each expert's place in the order of parts
  std::int64_t num_fp8;                 // experts with both stages in FP8
  MixedWeights w13_fp8;
  MixedWeights w13_bf16;
  MixedWeights w2_fp8;
  MixedWeights w2_bf16;
  std::optional<torch::stable::Tensor> const& w13_scale;
  std::optional<torch::stable::Tensor> const& w2_scale;
  std::optional<torch::stable::Tensor> const& a1_scale;
  std::optional<torch::stable::Tensor> const& a2_scale;
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

struct MixedForm {
  Form layer;  // of all experts; its precision is FP8
  MixedParts parts;
};

/// Checks the operands, all sizes, and the shapes of the weights' scales.
MixedForm check_mixed_form(MixedCall const& call);

/// Checks the rest of a call whose form has passed, for the kernels that are to run. `workspace` and `out` are the
/// call's, or made for it.
MixedLayer check_mixed_layer(MixedCall const& call,
                             MixedForm const& form,
                             MixedChoice const& choice,
                             torch::stable::Tensor const& workspace,
                             torch::stable::Tensor const& out);

}  // namespace moe_ext::fused_moe
