// Checks of tensor arguments whose messages are made from the values they test.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "common/check.hpp"
#include "common/input_type.hpp"

namespace moe_ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Each function reads a tensor's metadata once and puts a message together only when one is needed: a call through
// the stable ABI costs about as much as the comparison it feeds.

inline void check_on_device(
    char const* op, char const* argument, Tensor const& tensor, int device, char const* first = "a") {
  if (tensor.is_cuda() && tensor.get_device_index() == device) [[likely]] {
    return;
  }
  std::string const actual = tensor.is_cuda() ? concat("cuda:", static_cast<int>(tensor.get_device_index()))
                                              : "another kind of device";
  fail_value(op, ": `", argument, "` must be on cuda:", device, " like `", first, "`, got ", actual);
}

/// Two calls, where `Tensor::scalar_type` compares with one dtype after the other, a call each.
inline bool has_dtype(Tensor const& tensor, ScalarType expected) {
  std::int32_t actual = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &actual));
  return actual == torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(expected));
}

inline void check_dtype(char const* op, char const* argument, Tensor const& tensor, ScalarType expected) {
  if (!has_dtype(tensor, expected)) [[unlikely]] {
    fail_value(op,
               ": `",
               argument,
               "` must have dtype ",
               torch::headeronly::toString(expected),
               ", got ",
               torch::headeronly::toString(tensor.scalar_type()));
  }
}

inline InputType input_type(char const* op, char const* argument, Tensor const& tensor) {
  switch (ScalarType const actual = tensor.scalar_type()) {
    case ScalarType::BFloat16:
      return InputType::BF16;
    case ScalarType::Half:
      return InputType::FP16;
    case ScalarType::Float:
      return InputType::FP32;
    default:
      fail_value(op,
                 ": `",
                 argument,
                 "` must have dtype BFloat16, Half or Float, got ",
                 torch::headeronly::toString(actual));
  }
}

inline void check_rank(char const* op, char const* argument, Tensor const& tensor, std::int64_t rank) {
  std::int64_t const actual = tensor.dim();
  if (actual != rank) [[unlikely]] {
    fail_value(op, ": `", argument, "` must have ", rank, " dimensions, got ", actual);
  }
}

inline void check_size(
    char const* op, char const* argument, std::int64_t dim, std::int64_t size, std::int64_t expected) {
  if (size != expected) [[unlikely]] {
    fail_value(op, ": `", argument, "` must have size ", expected, " in dimension ", dim, ", got ", size);
  }
}

/// TMA and 16-byte stores: the innermost dimension is dense, base and outer strides are multiples of 16 bytes, and
/// rows do not overlap.
inline void check_rows_aligned(char const* op, char const* argument, Tensor const& tensor, void const* base) {
  auto const sizes = tensor.sizes();
  auto const strides = tensor.strides();
  std::size_t const last = sizes.size() - 1;
  std::int64_t const element_bytes = static_cast<std::int64_t>(tensor.element_size());
  if (sizes[last] == 0) {
    return;  // no element: strides mean nothing, and nothing is read or written
  }
  if (sizes[last] > 1 && strides[last] != 1) [[unlikely]] {
    fail_value(op, ": `", argument, "` must be contiguous in its last dimension, got stride ", strides[last]);
  }
  std::uintptr_t const remainder = reinterpret_cast<std::uintptr_t>(base) % 16;
  if (remainder != 0) [[unlikely]] {
    fail_value(
        op, ": `", argument, "` must begin at a multiple of 16 bytes, got ", remainder, " bytes past one");
  }
  for (std::size_t dim = 0; dim < last; ++dim) {
    std::int64_t const bytes = strides[dim] * element_bytes;
    if (sizes[dim] > 1 && (strides[dim] < sizes[last] || bytes % 16 != 0)) [[unlikely]] {
      fail_value(op,
                 ": `",
                 argument,
                 "` must have strides of at least a row and a multiple of 16 bytes, got ",
                 bytes,
                 " bytes in dimension ",
                 dim);
    }
  }
}

}  // namespace moe_ext
