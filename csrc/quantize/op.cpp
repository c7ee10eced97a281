// Checks, then parameters: from torch tensors to one launch, or two for a scale that a whole tensor shares.
#include "quantize/op.hpp"

#include <array>
#include <limits>

#include "common/cuda_context.hpp"
#include "common/math.hpp"
#include "common/tensor_checks.hpp"
#include "common/tensor_strides.hpp"
#include "quantize/launch.hpp"

namespace moe_ext::quantize {
namespace {

constexpr char const* kOp = "quantize_fp8";

/// Dense along k, and for `q` no two rows in the same place.
void check_rows(char const* argument, Tensor const& tensor, std::int64_t least_stride) {
  std::int64_t const last = tensor.dim() - 1;
  check_value(tensor.size(last) <= 1 || tensor.stride(last) == 1,
              kOp,
              ": `",
              argument,
              "` must be contiguous in its last dimension, got stride ",
              tensor.stride(last));
  for (std::int64_t dim = 0; dim < last; ++dim) {
    check_value(tensor.size(dim) <= 1 || tensor.stride(dim) >= least_stride,
                kOp,
                ": `",
                argument,
                "` must have strides of at least ",
                least_stride,
                ", got ",
                tensor.stride(dim),
                " in dimension ",
                dim);
  }
}

/// A value for each group, or one in any of two shapes for a tensor of one group: pointer and stride.
template <class T>
struct PerGroup {
  T* data = nullptr;
  std::int64_t stride = 0;
};

template <class T>
PerGroup<T> per_group(
    char const* argument, Tensor const& tensor, bool grouped, std::int64_t groups, T* data) {
  std::int64_t const dims = tensor.dim();
  check_value(dims == 1 || (dims == 0 && !grouped),
              kOp,
              ": `",
              argument,
              grouped ? "` must have 1 dimension, got " : "` must have 0 dimensions or 1, got ",
              dims);
  if (dims == 1) {
    check_size(kOp, argument, 0, tensor.size(0), groups);
  }
  return {.data = data, .stride = dims == 1 ? step(tensor, 0) : 0};
}

/// Where the scales of blocks along rows and columns lie, from how many dimensions the granularity gives them.
void set_scales(Params& params, Tensor const& scale, bool grouped, float* data) {
  params.scale = data;
  if (params.granularity == Granularity::Tensor) {
    params.scale_group_stride = per_group("scale", scale, grouped, params.groups, data).stride;
    return;
  }
  bool const along_k = params.granularity != Granularity::Row;
  std::int64_t const row_dim = grouped ? 1 : 0;
  check_rank(kOp, "scale", scale, row_dim + (along_k ? 2 : 1));
  if (grouped) {
    check_size(kOp, "scale", 0, scale.size(0), params.groups);
    params.scale_group_stride = step(scale, 0);
  }
  std::int64_t const rows =
      params.granularity == Granularity::Tile ? ceil_div(params.rows, kBlock) : params.rows;
  check_size(kOp, "scale", row_dim, scale.size(row_dim), rows);
  params.scale_row_stride = step(scale, row_dim);
  if (along_k) {
    check_size(kOp, "scale", row_dim + 1, scale.size(row_dim + 1), ceil_div(params.k, kBlock));
    params.scale_column_stride = step(scale, row_dim + 1);
  }
}

/// What only a scale for a whole tensor takes: the scale itself, or scratch to find it.
void set_tensor_scale(Params& params,
                      std::optional<Tensor> const& partials,
                      std::optional<Tensor> const& static_scale,
                      bool grouped,
                      int device) {
  bool const whole = params.granularity == Granularity::Tensor;
  if (static_scale.has_value()) {
    check_value(whole, kOp, ": `static_scale` must be absent but with one scale for a tensor, got a tensor");
    check_on_device(kOp, "static_scale", *static_scale, device, "x");
    check_dtype(kOp, "static_scale", *static_scale, ScalarType::Float);
    auto const* const data = static_cast<float const*>(static_scale->const_data_ptr());
    auto const given = per_group("static_scale", *static_scale, grouped, params.groups, data);
    params.static_scale = given.data;
    params.static_scale_stride = given.stride;
    return;
  }
  if (!whole) {
    return;
  }
  check_value(
      partials.has_value(), kOp, ": `partials` must be given for a scale of a whole tensor, got none");
  check_on_device(kOp, "partials", *partials, device, "x");
  check_dtype(kOp, "partials", *partials, ScalarType::Float);
  check_rank(kOp, "partials", *partials, 2);
  check_size(kOp, "partials", 0, partials->size(0), params.groups);
  std::int64_t const each = partials->size(1);
  constexpr std::int64_t kMost = 1 << 16;
  check_value(each >= 1 && each <= kMost && params.groups * each <= std::numeric_limits<int>::max(),
              kOp,
              ": `partials` must have 1 to ",
              kMost,
              " columns, got ",
              each);
  check_value(partials->is_contiguous(), kOp, ": `partials` must be contiguous, got other strides");
  params.partials = static_cast<float*>(partials->mutable_data_ptr());
  params.partials_per_group = static_cast<int>(each);
}

}  // namespace

void configured(Tensor const& x,
                Tensor const& q,
                Tensor const& scale,
                std::optional<Tensor> partials,
                std::optional<Tensor> static_scale,
                std::optional<Tensor> num_valid_rows,
                std::int64_t granularity,
                bool power_of_two) {
  check_value(granularity >= 0 && granularity <= static_cast<std::int64_t>(Granularity::Tile),
              kOp,
              ": `granularity` must be in [0, 3], got ",
              granularity);
  check_value(x.is_cuda(), kOp, ": `x` must be a CUDA tensor, got another kind of device");
  int const device = x.get_device_index();
  check_on_device(kOp, "q", q, device, "x");
  check_on_device(kOp, "scale", scale, device, "x");
  InputType const type = input_type(kOp, "x", x);
  check_dtype(kOp, "q", q, ScalarType::Float8_e4m3fn);
  check_dtype(kOp, "scale", scale, ScalarType::Float);
  std::int64_t const dims = x.dim();
  check_value(dims == 2 || dims == 3, kOp, ": `x` must have 2 or 3 dimensions, got ", dims);
  check_rank(kOp, "q", q, dims);
  for (std::int64_t dim = 0; dim < dims; ++dim) {
    check_size(kOp, "q", dim, q.size(dim), x.size(dim));
  }
  bool const grouped = dims == 3;
  std::int64_t const groups = grouped ? x.size(0) : 1;
  std::int64_t const rows = x.size(dims - 2);
  std::int64_t const k = x.size(dims - 1);
  check_rows("x", x, 0);
  check_rows("q", q, k);
  // The device counts blocks in 32 bits, with room for what a last CTA counts past the end.
  constexpr std::int64_t kMost = std::numeric_limits<int>::max() - (1 << 16);
  std::array<std::int64_t, 3> const factors{groups, rows, ceil_div(k, kBlock)};
  std::int64_t blocks = 1;
  for (std::int64_t const factor : factors) {
    check_value(factor == 0 || blocks <= kMost / factor,
                kOp,
                ": `x` must have at most ",
                kMost,
                " blocks of 128 along k, got more");
    blocks *= factor;
  }
  if (blocks == 0) {
    check_value(groups <= kMost && rows <= kMost && k <= kMost, kOp, ": `x` must have sizes below 2^31");
  }

  Params params{.x = x.const_data_ptr(),
                .q = static_cast<std::uint8_t*>(q.mutable_data_ptr()),
                .scale = nullptr,
                .static_scale = nullptr,
                .partials = nullptr,
                .num_valid_rows = nullptr,
                .type = type,
                .granularity = static_cast<Granularity>(granularity),
                .power_of_two = power_of_two,
                .groups = static_cast<int>(groups),
                .rows = static_cast<int>(rows),
                .k = static_cast<int>(k),
                .partials_per_group = 0,
                .x_group_stride = grouped ? step(x, 0) : 0,
                .x_row_stride = step(x, dims - 2),
                .q_group_stride = grouped ? step(q, 0) : 0,
                .q_row_stride = step(q, dims - 2),
                .scale_group_stride = 0,
                .scale_row_stride = 0,
                .scale_column_stride = 0,
                .static_scale_stride = 0,
                .count_stride = 0};
  set_scales(params, scale, grouped, static_cast<float*>(scale.mutable_data_ptr()));
  set_tensor_scale(params, partials, static_scale, grouped, device);
  if (num_valid_rows.has_value()) {
    check_on_device(kOp, "num_valid_rows", *num_valid_rows, device, "x");
    check_dtype(kOp, "num_valid_rows", *num_valid_rows, ScalarType::Int);
    auto const* const data = static_cast<int const*>(num_valid_rows->const_data_ptr());
    auto const counts = per_group("num_valid_rows", *num_valid_rows, grouped, groups, data);
    params.num_valid_rows = counts.data;
    params.count_stride = counts.stride;
  }
  if (blocks == 0) {
    return;
  }
  DeviceGuard const guard(static_cast<torch::stable::accelerator::DeviceIndex>(device));
  cudaStream_t const stream = current_stream(device);
  switch (params.granularity) {
    case Granularity::Tensor:
      return quantize_tensor(params, stream);
    case Granularity::Row:
      return quantize_rows(params, stream);
    case Granularity::RowBlock:
      return quantize_row_blocks(params, stream);
    case Granularity::Tile:
      return quantize_tiles(params, stream);
  }
}

}  // namespace moe_ext::quantize
