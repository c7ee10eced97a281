// Where a row of each tensor begins, and which rows count.
#pragma once

#include "quantize/params.hpp"
#include "quantize/vectors.cuh"

namespace moe_ext::quantize {

template <class T>
__device__ T const* x_row(Params const& params, int group, int row) {
  return static_cast<T const*>(params.x) + group * params.x_group_stride + row * params.x_row_stride;
}

__device__ inline std::uint8_t* q_row(Params const& params, int group, int row) {
  return params.q + group * params.q_group_stride + row * params.q_row_stride;
}

/// The scale of block (row, column) of a group, in the units of the granularity.
__device__ inline float& scale_at(Params const& params, int group, int row, int column) {
  return params.scale[group * params.scale_group_stride + row * params.scale_row_stride +
                      column * params.scale_column_stride];
}

/// Rows of a group that are read and written, whatever the count holds.
__device__ inline int valid_rows(Params const& params, int group) {
  if (params.num_valid_rows == nullptr) {
    return params.rows;
  }
  return min(max(params.num_valid_rows[group * params.count_stride], 0), params.rows);
}

}  // namespace moe_ext::quantize
