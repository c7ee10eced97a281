// The C++ side of torch.ops.moe_ext.combine_tokens_configured.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "fused_moe/combine.hpp"

namespace moe_ext::fused_moe {

/// Checks all of a combination but y and slot_row, which are left null.
CombineParams check_combine(torch::stable::Tensor const& out,
                            std::int64_t top_k,
                            std::optional<torch::stable::Tensor> const& topk_weights,
                            std::optional<torch::stable::Tensor> const& addend,
                            double routed_scale);

/// Adds each token's rows of `y` into `out` (combine.hpp), whose rows are the tokens. Checks everything memory safety
/// depends on; reads no device memory.
void combine_tokens_configured(torch::stable::Tensor const& y,
                               torch::stable::Tensor const& slot_row,
                               std::optional<torch::stable::Tensor> topk_weights,
                               std::optional<torch::stable::Tensor> addend,
                               torch::stable::Tensor const& out,
                               std::int64_t top_k,
                               double routed_scale);

}  // namespace moe_ext::fused_moe
