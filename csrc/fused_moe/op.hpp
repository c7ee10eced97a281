// The C++ side of torch.ops.moe_ext.fused_moe_configured.
#pragma once

#include <optional>
#include <vector>

#include <torch/csrc/stable/tensor.h>

namespace moe_ext::fused_moe {

/// Yes-or-no options of a layer, bits of `flags`; python/moe_ext/_fused_moe_launch.py has their twins.
enum LayerFlag : std::int64_t {
  kInterleaved = 1,     // w13 has gate and up rows in turn
  kUngated = 2,         // w13 has one row for each feature
  kWeightsOnInput = 4,  // topk_weights multiply rows of hidden_states, not of the result
};

/// A layer of experts by given kernels, in a given workspace. `layout`: the fields of python/moe_ext/
/// _fused_moe_workspace.py's WorkspaceLayout in order. `gating`: linear, cubic, quintic, gate_limit, up_limit,
/// up_offset (grouped_gemm/params.hpp). Checks everything memory safety depends on; reads no device memory.
void fused_moe_configured(torch::stable::Tensor const& hidden_states,
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
                          torch::stable::Tensor const& workspace,
                          torch::stable::Tensor const& out,
                          std::vector<std::int64_t> const& layout,
                          std::vector<double> const& gating,
                          double routed_scale,
                          std::int64_t first_expert,
                          std::int64_t n_segments,
                          std::int64_t a1_format,
                          std::int64_t a2_format,
                          std::int64_t flags,
                          std::int64_t w13_config,
                          std::int64_t w2_config);

}  // namespace moe_ext::fused_moe
