// Checks of tensor arguments whose messages are made from the values they test.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "common/check.hpp"

namespace moe_ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check_on_device(char const* op, char const* argument, Tensor const& tensor, int device) {
  check_value(tensor.is_cuda() && tensor.get_device_index() == device,
              op,
              ": `",
              argument,
              "` must be on cuda:",
              device,
              " like `a`, got ",
              tensor.is_cuda() ? concat("cuda:", static_cast<int>(tensor.get_device_index()))
                               : "another kind of device");
}

inline void check_dtype(char const* op, char const* argument, Tensor const& tensor, ScalarType expected) {
  check_value(tensor.scalar_type() == expected,
              op,
              ": `",
              argument,
              "` must have dtype ",
              torch::headeronly::toString(expected),
              ", got ",
              torch::headeronly::toString(tensor.scalar_type()));
}

inline void check_rank(char const* op, char const* argument, Tensor const& tensor, std::int64_t rank) {
  check_value(
      tensor.dim() == rank, op, ": `", argument, "` must have ", rank, " dimensions, got ", tensor.dim());
}

inline void check_size(
    char const* op, char const* argument, std::int64_t dim, std::int64_t size, std::int64_t expected) {
  check_value(size == expected,
              op,
              ": `",
              argument,
              "` must have size ",
              expected,
              " in dimension ",
              dim,
              ", got ",
              size);
}

/// TMA and 16-byte stores: the innermost dimension is dense, base and outer strides are multiples of 16 bytes.
inline void check_rows_aligned(char const* op, char const* argument, Tensor const& tensor, void const* base) {
  std::int64_t const last = tensor.dim() - 1;
  std::int64_t const element_bytes = static_cast<std::int64_t>(tensor.element_size());
  check_value(tensor.size(last) <= 1 || tensor.stride(last) == 1,
              op,
              ": `",
              argument,
              "` must be contiguous in its last dimension, got stride ",
              tensor.stride(last));
  check_value(reinterpret_cast<std::uintptr_t>(base) % 16 == 0,
              op,
              ": `",
              argument,
              "` must begin at a multiple of 16 bytes, got an address of remainder ",
              reinterpret_cast<std::uintptr_t>(base) % 16);
  for (std::int64_t dim = 0; dim < last; ++dim) {
    std::int64_t const bytes = tensor.stride(dim) * element_bytes;
    check_value(tensor.size(dim) <= 1 || (bytes > 0 && bytes % 16 == 0),
                op,
                ": `",
                argument,
                "` must have strides of a positive multiple of 16 bytes, got ",
                bytes,
                " bytes in dimension ",
                dim);
  }
}

}  // namespace moe_ext
