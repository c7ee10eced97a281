// What the shape of a weight's scale says. The twin of `weight_scale_of` in python/moe_ext/_fused_moe_scales.py, which
// tests/test_fused_moe_twins.py holds equal. Host arithmetic alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>

#include "common/math.hpp"
#include "grouped_gemm/config.hpp"

namespace moe_ext::fused_moe {

/// Of the activations that meet a weight.
enum class Granularity : std::int64_t {
  None,       // BF16
  Tensor,     // one scale for all rows where one is given, else one for each row
  Row,        // one for each row
  RowBlocks,  // one for each 128 values of a row
};

struct WeightScale {
  Granularity granularity = Granularity::None;
  std::int64_t n_segments = 1;  // 2 where gate and up have block grids of their own

  bool operator==(WeightScale const&) const = default;
};

constexpr bool has_shape(std::span<std::int64_t const> shape, std::initializer_list<std::int64_t> expected) {
  if (shape.size() != expected.size()) {
    return false;
  }
  std::size_t dim = 0;
  for (std::int64_t const size : expected) {
    if (shape[dim++] != size) {
      return false;
    }
  }
  return true;
}

/// The layout of the scales of a weight (num_experts, n, k), none where the shape fits no layout.
constexpr std::optional<WeightScale> weight_scale_of(std::span<std::int64_t const> shape,
                                                     std::int64_t num_experts,
                                                     std::int64_t n,
                                                     std::int64_t k) {
  constexpr std::int64_t kBlock = grouped_gemm::kScaleBlock;
  if (has_shape(shape, {}) || has_shape(shape, {1}) || has_shape(shape, {num_experts}) ||
      has_shape(shape, {num_experts, 1}) || has_shape(shape, {num_experts, 1, 1})) {
    return WeightScale{Granularity::Tensor};
  }
  if (has_shape(shape, {num_experts, n}) || has_shape(shape, {num_experts, n, 1})) {
    return WeightScale{Granularity::Row};
  }
  std::int64_t const along_k = ceil_div(k, kBlock);
  if (has_shape(shape, {num_experts, ceil_div(n, kBlock), along_k})) {
    return WeightScale{Granularity::RowBlocks};
  }
  if (has_shape(shape, {num_experts, 2, ceil_div(n / 2, kBlock), along_k})) {
    return WeightScale{Granularity::RowBlocks, 2};
  }
  return std::nullopt;
}

}  // namespace moe_ext::fused_moe
