// The C++ side of torch.ops.moe_ext.fused_moe_masked_configured.
#pragma once

#include <optional>
#include <vector>

#include <torch/csrc/stable/tensor.h>

namespace moe_ext::fused_moe {

/// The experts of a layer on the first counts[e] rows of each expert's buffer, as
/// python/moe_ext/fused_moe_masked.py has it, into `out`, by given kernels, rows of configs.def, and with a given
/// gating, the numbers of `Choice` (choices.hpp); `flags` are LayerFlag (op.hpp). `intermediate`, `quantised` and
/// `scale` are scratch (masked_checks.hpp); the last two are for FP8 weights alone. Checks everything memory safety
/// depends on; reads no device memory.
void fused_moe_masked_configured(torch::stable::Tensor const& hidden_states,
                                 torch::stable::Tensor const& w13,
                                 torch::stable::Tensor const& w2,
                                 torch::stable::Tensor const& counts,
                                 std::optional<torch::stable::Tensor> const& w13_scale,
                                 std::optional<torch::stable::Tensor> const& w2_scale,
                                 std::optional<torch::stable::Tensor> const& a1_scale,
                                 std::optional<torch::stable::Tensor> const& a2_scale,
                                 std::optional<torch::stable::Tensor> const& w13_bias,
                                 std::optional<torch::stable::Tensor> const& w2_bias,
                                 torch::stable::Tensor const& intermediate,
                                 std::optional<torch::stable::Tensor> const& quantised,
                                 std::optional<torch::stable::Tensor> const& scale,
                                 torch::stable::Tensor const& out,
                                 std::int64_t flags,
                                 std::int64_t w13_config,
                                 std::int64_t w2_config,
                                 std::vector<double> const& gating);

}  // namespace moe_ext::fused_moe
