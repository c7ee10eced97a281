// The C++ side of torch.ops.moe_ext.fused_moe_launch, fused_moe_launch_with and fused_moe_configured.
#pragma once

#include <optional>
#include <vector>

#include <torch/csrc/stable/tensor.h>

namespace moe_ext::fused_moe {

/// Yes-or-no options of a layer, bits of `flags`; python/moe_ext/_fused_moe_launch.py has their twins. One number,
/// because each argument costs the caller 0.1 to 0.2 us.
enum LayerFlag : std::int64_t {
  kInterleaved = 1,      // w13 has gate and up rows in turn
  kUngated = 2,          // w13 has one row for each feature
  kWeightsOnInput = 4,   // topk_weights multiply rows of hidden_states, not of the result
  kFast = 8,             // FP8 sums may stay in the tensor core's accumulator
  kBatchInvariant = 16,  // Python chooses no kernel that splits K; here it is part of the problem
  kRemember = 32,        // the kernels and the gating are Python's choice: remember it
};

/// The activation's number comes in `flags` above the bits. Only Python knows which it is; here it is part of what a
/// choice is remembered for.
inline constexpr int kActivationShift = 8;

/// A layer of experts, as python/moe_ext/fused_moe.py has it: into `out` or a new tensor, in `workspace` or memory of
/// its own, by the kernels and with the gating that were remembered for the problem. `alpha` and `limit` are those of
/// the activation, 0 where it has its own. Reads no device memory.
/// Refuses, by std::invalid_argument, what is wrong, what has no token, and a problem that nothing was remembered for:
/// Python then checks, chooses and calls `fused_moe_configured`. So nothing here calls Python.
torch::stable::Tensor fused_moe_launch_with(torch::stable::Tensor const& hidden_states,
                                            torch::stable::Tensor const& w13,
                                            torch::stable::Tensor const& w2,
                                            torch::stable::Tensor const& topk_weights,
                                            torch::stable::Tensor const& topk_ids,
                                            std::optional<torch::stable::Tensor> const& w13_scale,
                                            std::optional<torch::stable::Tensor> const& w2_scale,
                                            std::optional<torch::stable::Tensor> const& a1_scale,
                                            std::optional<torch::stable::Tensor> const& a2_scale,
                                            std::optional<torch::stable::Tensor> const& w13_bias,
                                            std::optional<torch::stable::Tensor> const& w2_bias,
                                            std::optional<torch::stable::Tensor> const& expert_map,
                                            std::optional<torch::stable::Tensor> const& addend,
                                            std::optional<torch::stable::Tensor> const& workspace,
                                            std::optional<torch::stable::Tensor> const& out,
                                            std::int64_t flags,
                                            double alpha,
                                            double limit,
                                            double routed_scale,
                                            std::int64_t first_expert);

/// The same without what is seldom said.
torch::stable::Tensor fused_moe_launch(torch::stable::Tensor const& hidden_states,
                                       torch::stable::Tensor const& w13,
                                       torch::stable::Tensor const& w2,
                                       torch::stable::Tensor const& topk_weights,
                                       torch::stable::Tensor const& topk_ids,
                                       std::optional<torch::stable::Tensor> const& w13_scale,
                                       std::optional<torch::stable::Tensor> const& w2_scale,
                                       std::optional<torch::stable::Tensor> const& workspace,
                                       std::optional<torch::stable::Tensor> const& out,
                                       std::int64_t flags);

/// The same by given kernels, rows of configs.def, and with a given gating: the numbers of `Choice` (choices.hpp).
/// With kRemember and a `table` that is not -1 the rule is remembered that the kernels were chosen by.
torch::stable::Tensor fused_moe_configured(torch::stable::Tensor const& hidden_states,
                                           torch::stable::Tensor const& w13,
                                           torch::stable::Tensor const& w2,
                                           torch::stable::Tensor const& topk_weights,
                                           torch::stable::Tensor const& topk_ids,
                                           std::optional<torch::stable::Tensor> const& w13_scale,
                                           std::optional<torch::stable::Tensor> const& w2_scale,
                                           std::optional<torch::stable::Tensor> const& a1_scale,
                                           std::optional<torch::stable::Tensor> const& a2_scale,
                                           std::optional<torch::stable::Tensor> const& w13_bias,
                                           std::optional<torch::stable::Tensor> const& w2_bias,
                                           std::optional<torch::stable::Tensor> const& expert_map,
                                           std::optional<torch::stable::Tensor> const& addend,
                                           std::optional<torch::stable::Tensor> const& workspace,
                                           std::optional<torch::stable::Tensor> const& out,
                                           std::int64_t flags,
                                           double alpha,
                                           double limit,
                                           double routed_scale,
                                           std::int64_t first_expert,
                                           std::int64_t w13_config,
                                           std::int64_t w2_config,
                                           std::vector<double> const& gating,
                                           std::int64_t table,
                                           std::int64_t allowed);

}  // namespace moe_ext::fused_moe
