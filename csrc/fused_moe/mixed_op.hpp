// The C++ side of torch.ops.moe_ext.fused_moe_mixed_launch.
#pragma once

#include <optional>
#include <vector>

#include <torch/csrc/stable/tensor.h>

namespace moe_ext::fused_moe {

/// A layer of experts in two precisions, as python/moe_ext/precision/mixed.py has it: into `out` or a new tensor, in
/// `workspace` or memory of its own. `flags`, `alpha` and `limit` are those of fused_moe_launch_with (op.hpp). By the
/// kernels and with the gating of `MixedChoice` (mixed_choices.hpp), or where both are empty by those that were
/// remembered for the problem. Reads no device memory. Refuses what fused_moe_launch_with refuses, in the same way.
torch::stable::Tensor fused_moe_mixed_launch(torch::stable::Tensor const& hidden_states,
                                             torch::stable::Tensor const& topk_weights,
                                             torch::stable::Tensor const& topk_ids,
                                             torch::stable::Tensor const& places,
                                             std::optional<torch::stable::Tensor> const& w13_fp8,
                                             std::optional<torch::stable::Tensor> const& w13_bf16,
                                             std::optional<torch::stable::Tensor> const& w2_fp8,
                                             std::optional<torch::stable::Tensor> const& w2_bf16,
                                             std::optional<torch::stable::Tensor> const& w13_scale,
                                             std::optional<torch::stable::Tensor> const& w2_scale,
                                             std::optional<torch::stable::Tensor> const& a1_scale,
                                             std::optional<torch::stable::Tensor> const& a2_scale,
                                             std::optional<torch::stable::Tensor> const& w13_fp8_bias,
                                             std::optional<torch::stable::Tensor> const& w13_bf16_bias,
                                             std::optional<torch::stable::Tensor> const& w2_fp8_bias,
                                             std::optional<torch::stable::Tensor> const& w2_bf16_bias,
                                             std::optional<torch::stable::Tensor> const& expert_map,
                                             std::optional<torch::stable::Tensor> const& addend,
                                             std::optional<torch::stable::Tensor> const& workspace,
                                             std::optional<torch::stable::Tensor> const& out,
                                             std::int64_t num_fp8,
                                             std::int64_t flags,
                                             double alpha,
                                             double limit,
                                             double routed_scale,
                                             std::int64_t first_expert,
                                             std::vector<std::int64_t> const& kernels,
                                             std::vector<double> const& gating);

}  // namespace moe_ext::fused_moe
