// The C++ side of torch.ops.moe_ext.gather_quantize_configured.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "fused_moe/gather.hpp"

namespace moe_ext::fused_moe {

/// Sets what rows are multiplied by: (num_tokens, top_k) in bfloat16 or float32, checked against the sizes in `params`.
void set_weights(GatherParams& params, torch::stable::Tensor const& weights, int device);

/// Row r of `out` = row row_slot[r] / top_k of `x`, times the slot's weight if there are weights, in `format` (of
/// gather.hpp), for the first `num_rows` rows. With `slot_row` and without weights that says which rows there are, and
/// tokens are read once. Checks everything memory safety depends on; reads no device memory.
void gather_quantize_configured(torch::stable::Tensor const& x,
                                std::optional<torch::stable::Tensor> row_slot,
                                std::optional<torch::stable::Tensor> num_rows,
                                std::optional<torch::stable::Tensor> topk_weights,
                                torch::stable::Tensor const& out,
                                std::optional<torch::stable::Tensor> scale,
                                std::optional<torch::stable::Tensor> static_scale,
                                std::int64_t top_k,
                                std::int64_t format,
                                bool programmatic,
                                std::optional<torch::stable::Tensor> slot_row);

}  // namespace moe_ext::fused_moe
