// The C++ side of torch.ops.moe_ext.topk_routing_configured.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

namespace moe_ext::routing {

/// For each token the `weights.size(1)` best experts, in `ids`, and their `weights`. `scoring` is one of params.hpp.
/// Checks everything memory safety depends on; reads no device memory.
void configured(torch::stable::Tensor const& logits,
                std::optional<torch::stable::Tensor> correction_bias,
                torch::stable::Tensor const& weights,
                torch::stable::Tensor const& ids,
                std::int64_t scoring,
                bool renormalize,
                std::int64_t num_groups,
                std::int64_t topk_groups,
                double scale);

}  // namespace moe_ext::routing
