// Sizes and strides as a kernel wants them, where a tensor may have fewer dimensions or only one element in one.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace moe_ext {

/// Size of dimension `dim`, 1 past the last one.
inline std::int64_t size_or_one(torch::stable::Tensor const& tensor, std::int64_t dim) {
  return dim < tensor.dim() ? tensor.size(dim) : 1;
}

/// Stride of dimension `dim`, 0 where there is nothing to step to.
inline std::int64_t step(torch::stable::Tensor const& tensor, std::int64_t dim) {
  return size_or_one(tensor, dim) > 1 ? tensor.stride(dim) : 0;
}

}  // namespace moe_ext
