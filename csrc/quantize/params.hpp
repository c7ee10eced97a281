// What a quantisation needs to know, without torch.
#pragma once

#include <cstdint>

#include "common/input_type.hpp"

namespace moe_ext::quantize {

/// Values that share a scale; the numbers are those of the op's argument.
enum class Granularity : std::int64_t { Tensor = 0, Row = 1, RowBlock = 2, Tile = 3 };

/// A scale's values along a row, and rows of a tile.
inline constexpr int kBlock = 128;

/// Strides are in elements, 0 in dimensions of one. Rows from `num_valid_rows` on are neither read nor written.
struct Params {
  void const* x;              // (groups, rows, k), K contiguous
  std::uint8_t* q;            // (groups, rows, k), K contiguous, FP8 E4M3
  float* scale;               // (groups, blocks of rows, blocks of k), where there are such blocks
  float const* static_scale;  // (groups,), or null: the scale is computed
  float* partials;  // (groups, partials_per_group), scratch of Granularity::Tensor without static_scale
  int const* num_valid_rows;  // (groups,), or null: all
  InputType type;
  Granularity granularity;
  bool power_of_two;
  int groups;
  int rows;
  int k;
  int partials_per_group;
  std::int64_t x_group_stride;
  std::int64_t x_row_stride;
  std::int64_t q_group_stride;
  std::int64_t q_row_stride;
  std::int64_t scale_group_stride;
  std::int64_t scale_row_stride;
  std::int64_t scale_column_stride;
  std::int64_t static_scale_stride;
  std::int64_t count_stride;
};

}  // namespace moe_ext::quantize
