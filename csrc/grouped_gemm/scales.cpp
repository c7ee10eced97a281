// Scale tensors to pointers and strides.
#include "grouped_gemm/scales.hpp"

#include "common/tensor_checks.hpp"
#include "common/tensor_strides.hpp"
#include "grouped_gemm/tiling.hpp"

namespace moe_ext::grouped_gemm {
namespace {

constexpr char const* kOp = "grouped_gemm";

float const* check_scale(char const* argument, Tensor const& scale, ScaleShape const& shape) {
  check_value(shape.kernel.dtype == Dtype::FP8,
              kOp,
              ": `",
              argument,
              "` must be absent for bfloat16 operands, got a tensor");
  check_on_device(kOp, argument, scale, shape.device);
  check_dtype(kOp, argument, scale, ScalarType::Float);
  return static_cast<float const*>(scale.const_data_ptr());
}

[[noreturn]] void fail_shape(char const* argument, Tensor const& scale, ScaleShape const& shape) {
  std::string actual;
  for (std::int64_t const size : scale.sizes()) {
    actual += (actual.empty() ? "" : ", ") + std::to_string(size);
  }
  fail_value(kOp,
             ": `",
             argument,
             "` must have a shape that kernel ",
             std::string(shape.kernel.id),
             " takes, got (",
             actual,
             ")");
}

/// Whether 128 columns that begin at a multiple of 128 of a tile in plain order lie in one scale block each.
bool one_block_a_column(ScaleShape const& shape) {
  if (shape.n_offset != 0) {
    return false;
  }
  if (shape.kernel.output ==
      Output::Gated) {  // columns of gate, and those of up, which begin anew or at n / 2
    return shape.n_segments == 2 || shape.n % (2 * kScaleBlock) == 0;
  }
  return shape.n_segments == 1 || shape.n / 2 % kScaleBlock == 0;
}

}  // namespace

TokenScales check_token_scales(std::optional<Tensor> const& scale, ScaleShape const& shape) {
  if (!scale.has_value()) {
    check_value(!is_block_scaled(shape.kernel.accumulate),
                kOp,
                ": `scale_a` must be given with scales per block, got none");
    return {};
  }
  TokenScales result{
      .data = check_scale("scale_a", *scale, shape), .row_stride = 0, .k_stride = 0, .group_shift = 0};
  std::int64_t const dims = scale->dim();
  if (dims == 0 || (dims == 1 && scale->size(0) == 1)) {
    return result;
  }
  bool const masked = shape.max_rows > 0;
  if (masked && dims == 1 && scale->size(0) == shape.num_groups) {
    (shape.max_rows == 1 ? result.row_stride : result.group_shift) = step(*scale, 0);
    return result;
  }
  std::int64_t const row_dims = masked ? 2 : 1;
  std::int64_t const columns = size_or_one(*scale, row_dims);
  bool const blocks = is_block_scaled(shape.kernel.accumulate) && columns == ceil_div(shape.k, kScaleBlock);
  bool const rows_fit = masked
                            ? scale->size(0) == shape.num_groups && size_or_one(*scale, 1) == shape.max_rows
                            : scale->size(0) == shape.num_rows;
  if (dims < row_dims || dims > row_dims + 1 || !rows_fit || (columns != 1 && !blocks)) {
    fail_shape("scale_a", *scale, shape);
  }
  result.k_stride = step(*scale, row_dims);
  // A stride of 0 would say "one for all rows": with one row any other does.
  if (!masked || shape.max_rows == 1) {
    result.row_stride = step(*scale, 0);
  } else {
    result.row_stride = step(*scale, 1);
    result.group_shift = step(*scale, 0) - shape.max_rows * result.row_stride;
  }
  return result;
}

WeightScales check_weight_scales(std::optional<Tensor> const& scale, ScaleShape const& shape) {
  bool const blocked = is_block_scaled(shape.kernel.accumulate);
  check_value(shape.n_segments == 1 || (blocked && shape.n_segments == 2 && shape.n % 2 == 0),
              kOp,
              ": `n_segments` must be 1, or 2 with scales per block and an even n, got ",
              shape.n_segments);
  check_value(shape.n_offset == 0 || (blocked && shape.n_offset > 0 && shape.n_offset < kScaleBlock),
              kOp,
              ": `scale_b_offset` must begin with 0, or 0 to 127 with scales per block, got ",
              shape.n_offset);
  check_value(
      shape.k_offset == 0 || (shape.kernel.accumulate == Accumulate::Shifted && shape.k_offset > 0 &&
                              shape.k_offset < kScaleBlock),
      kOp,
      ": `scale_b_offset` must end with 0, or 0 to 127 with a kernel for blocks that begin inside k, got ",
      shape.k_offset);
  std::int64_t const segment_n = shape.n / shape.n_segments;
  std::int64_t const segment_blocks = ceil_div(segment_n + shape.n_offset, kScaleBlock);
  WeightScales result{.data = nullptr,
                      .group_stride = 0,
                      .segment_stride = 0,
                      .n_stride = 0,
                      .k_stride = 0,
                      .segment_n = static_cast<int>(segment_n),
                      .segment_blocks = static_cast<int>(segment_blocks),
                      .n_offset = static_cast<int>(shape.n_offset),
                      .k_offset = static_cast<int>(shape.k_offset)};
  if (!scale.has_value()) {
    check_value(!blocked, kOp, ": `scale_b` must be given with scales per block, got none");
    return result;
  }
  result.data = check_scale("scale_b", *scale, shape);
  // What is said of the blocks' grid leaves no other layout.
  bool const may_be_by_group = shape.n_segments == 1 && shape.n_offset == 0 && shape.k_offset == 0;
  std::int64_t const dims = scale->dim();
  if (may_be_by_group && (dims == 0 || (dims == 1 && scale->size(0) == 1))) {
    return result;
  }
  if (dims == 0 || dims > 4 || scale->size(0) != shape.num_groups) {
    fail_shape("scale_b", *scale, shape);
  }
  result.group_stride = step(*scale, 0);
  std::int64_t const one = size_or_one(*scale, 1);
  std::int64_t const two = size_or_one(*scale, 2);
  std::int64_t const three = size_or_one(*scale, 3);
  std::int64_t const k_blocks = ceil_div(shape.k + shape.k_offset, kScaleBlock);
  if (!blocked) {
    if ((one != 1 && one != shape.n) || two != 1 || three != 1) {
      fail_shape("scale_b", *scale, shape);
    }
    result.n_stride = step(*scale, 1);
    return result;
  }
  if (may_be_by_group && dims <= 3 && one == 1 && two == 1) {
    return result;  // one for each group
  }
  if (dims == 3 && one == shape.n_segments * segment_blocks && two == k_blocks) {
    result.n_stride = step(*scale, 1);
    result.segment_stride = segment_blocks * result.n_stride;
    result.k_stride = step(*scale, 2);
  } else if (dims == 4 && one == shape.n_segments && two == segment_blocks && three == k_blocks) {
    result.segment_stride = step(*scale, 1);
    result.n_stride = step(*scale, 2);
    result.k_stride = step(*scale, 3);
  } else {
    fail_shape("scale_b", *scale, shape);
  }
  check_value(
      is_swapped(shape.kernel.order) || one_block_a_column(shape),
      kOp,
      ": `config` must be a Swap-AB kernel where blocks of scale_b do not begin at multiples of 128, got ",
      std::string(shape.kernel.id));
  return result;
}

}  // namespace moe_ext::grouped_gemm
