// The C++ side of torch.ops.moe_ext.quantize_fp8_configured.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

namespace moe_ext::quantize {

/// q = x / scale in FP8 E4M3 for the first `num_valid_rows` rows (of each group), and `scale`, computed or copied from
/// `static_scale`. `granularity` is one of params.hpp. `partials` is scratch, (groups, any number) float, for a
/// computed scale for each tensor. Checks everything memory safety depends on; reads no device memory.
void configured(torch::stable::Tensor const& x,
                torch::stable::Tensor const& q,
                torch::stable::Tensor const& scale,
                std::optional<torch::stable::Tensor> partials,
                std::optional<torch::stable::Tensor> static_scale,
                std::optional<torch::stable::Tensor> num_valid_rows,
                std::int64_t granularity,
                bool power_of_two);

}  // namespace moe_ext::quantize
