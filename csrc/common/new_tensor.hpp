// Tensors that an op makes itself.
#pragma once

#include <optional>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/tensor.h>

#include "common/check.hpp"

namespace moe_ext {

/// A contiguous tensor on a GPU, uninitialised, or none where torch has no memory for it. `dtype` is a code of
/// aoti_torch_dtype_*.
template <std::size_t kRank>
std::optional<torch::stable::Tensor> new_empty(std::int64_t const (&sizes)[kRank], int dtype, int device) {
  std::int64_t strides[kRank];
  std::int64_t stride = 1;
  for (std::size_t dim = kRank; dim-- > 0;) {
    strides[dim] = stride;
    stride *= sizes[dim];
  }
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(
          kRank, sizes, strides, dtype, aoti_torch_device_type_cuda(), device, &handle) != AOTI_TORCH_SUCCESS)
      [[unlikely]] {
    return std::nullopt;
  }
  return torch::stable::Tensor(handle);
}

/// One float, 1.
inline torch::stable::Tensor new_one(int device) {
  std::int64_t const sizes[] = {1};
  std::optional<torch::stable::Tensor> one = new_empty(sizes, aoti_torch_dtype_float32(), device);
  if (!one.has_value() || aoti_torch_aten_fill__Scalar(one->get(), 1.0) != AOTI_TORCH_SUCCESS) [[unlikely]] {
    throw std::runtime_error(concat("moe_ext: torch could not make a scale of 1 on cuda:", device));
  }
  return *std::move(one);
}

}  // namespace moe_ext
