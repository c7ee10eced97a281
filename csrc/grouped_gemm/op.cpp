// Checks, then parameters: from torch tensors to one launch.
#include "grouped_gemm/op.hpp"

#include <limits>

#include "common/cuda_context.hpp"
#include "common/tensor_checks.hpp"
#include "grouped_gemm/empty_sum.hpp"
#include "grouped_gemm/registry.hpp"
#include "grouped_gemm/scales.hpp"
#include "grouped_gemm/tiling.hpp"

namespace moe_ext::grouped_gemm {
namespace {

constexpr char const* kOp = "grouped_gemm";
constexpr std::int64_t kMaxGroups = 4096;

/// A stride in bytes that TMA accepts even where there is only one row and torch may say anything.
std::int64_t stride_bytes(Tensor const& tensor, std::int64_t dim, std::int64_t inner_bytes) {
  std::int64_t const dense = (inner_bytes + 15) / 16 * 16;
  return tensor.size(dim) > 1 ? tensor.stride(dim) * static_cast<std::int64_t>(tensor.element_size()) : dense;
}

/// The dimension whose stride leads from row to row of `a` or `out`, all groups' rows one after the other.
std::int64_t row_dim(char const* argument, Tensor const& tensor) {
  if (tensor.dim() == 2) {
    return 0;
  }
  std::int64_t const groups = tensor.size(0);
  std::int64_t const rows = tensor.size(1);
  check_value(groups <= 1 || rows <= 1 || tensor.stride(0) == rows * tensor.stride(1),
              kOp,
              ": `",
              argument,
              "` must have groups that follow each other without a gap, got strides ",
              tensor.stride(0),
              " and ",
              tensor.stride(1),
              " for ",
              rows,
              " rows a group");
  return rows > 1 ? 1 : 0;
}

Bias check_bias(std::optional<Tensor> const& bias, std::int64_t num_groups, std::int64_t n, int device) {
  if (!bias.has_value()) {
    return {};
  }
  check_on_device(kOp, "bias", *bias, device);
  ScalarType const type = bias->scalar_type();
  check_value(type == ScalarType::BFloat16 || type == ScalarType::Float,
              kOp,
              ": `bias` must have dtype BFloat16 or Float, got ",
              torch::headeronly::toString(type));
  check_rank(kOp, "bias", *bias, 2);
  check_size(kOp, "bias", 0, bias->size(0), num_groups);
  check_size(kOp, "bias", 1, bias->size(1), n);
  return {.data = bias->const_data_ptr(),
          .group_stride = bias->stride(0),
          .n_stride = bias->stride(1),
          .dtype = type == ScalarType::Float ? OutDtype::FP32 : OutDtype::BF16};
}

/// TMA strides are below 2^40 bytes.
void check_stride_limit(char const* argument, std::int64_t bytes) {
  check_value(bytes < (std::int64_t{1} << 40),
              kOp,
              ": `",
              argument,
              "` must have strides below 2^40 bytes, got ",
              bytes);
}

}  // namespace

void configured(Tensor const& a,
                Tensor const& b,
                Tensor const& offs,
                std::optional<Tensor> scale_a,
                std::optional<Tensor> scale_b,
                std::optional<Tensor> bias,
                Tensor const& out,
                bool offs_ready,
                std::int64_t n_segments,
                std::int64_t scale_n_offset,
                std::int64_t scale_k_offset,
                std::int64_t config) {
  auto const& kernels = registered_kernels();
  auto const num_kernels = static_cast<std::int64_t>(kernels.size());
  check_value(
      config >= 0 && config < num_kernels, kOp, ": `config` must be in [0, ", num_kernels, "), got ", config);
  RegisteredKernel const& kernel = kernels[static_cast<std::size_t>(config)];
  bool const fp8 = kernel.config.dtype == Dtype::FP8;

  check_value(a.is_cuda(), kOp, ": `a` must be a CUDA tensor, got another kind of device");
  int const device = a.get_device_index();
  check_on_device(kOp, "b", b, device);
  check_on_device(kOp, "offs", offs, device);
  check_on_device(kOp, "out", out, device);
  ScalarType const operand = fp8 ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16;
  check_dtype(kOp, "a", a, operand);
  check_dtype(kOp, "b", b, operand);
  check_dtype(kOp, "offs", offs, ScalarType::Int);
  std::int64_t const dims = a.dim();
  bool const masked = dims == 3;
  check_value(dims == 2 || masked, kOp, ": `a` must have 2 dimensions, or 3 if masked, got ", dims);
  check_rank(kOp, "b", b, 3);
  check_rank(kOp, "offs", offs, 1);
  check_rank(kOp, "out", out, dims);

  std::int64_t const max_rows = masked ? a.size(1) : 0;
  std::int64_t const num_rows = masked ? a.size(0) * max_rows : a.size(0);
  std::int64_t const k = a.size(dims - 1);
  std::int64_t const num_groups = b.size(0);
  std::int64_t const n = b.size(1);
  check_size(kOp, "b", 2, b.size(2), k);
  check_value(num_groups >= 1 && num_groups <= kMaxGroups,
              kOp,
              ": `b` must have 1 to ",
              kMaxGroups,
              " groups, got ",
              num_groups);
  check_size(kOp, masked ? "counts" : "offs", 0, offs.size(0), num_groups);
  check_value(
      num_groups == 1 || offs.stride(0) == 1,
      kOp,
      masked ? ": `counts` must be contiguous, got stride " : ": `offs` must be contiguous, got stride ",
      offs.stride(0));
  if (masked) {
    check_size(kOp, "a", 0, a.size(0), num_groups);
    check_size(kOp, "out", 1, out.size(1), max_rows);
  }
  check_size(kOp, "out", 0, out.size(0), a.size(0));
  check_size(kOp, "out", dims - 1, out.size(dims - 1), n);

  ScalarType const out_type = out.scalar_type();
  check_value(out_type == ScalarType::BFloat16 || out_type == ScalarType::Float,
              kOp,
              ": `out` must have dtype BFloat16 or Float, got ",
              torch::headeronly::toString(out_type));
  std::int64_t const n_multiple = out_type == ScalarType::BFloat16 ? 8 : 4;
  check_value(n >= 1 && n % n_multiple == 0,
              kOp,
              ": n, the rows of `b[g]`, must be a positive multiple of ",
              n_multiple,
              ", got ",
              n);
  void* const out_pointer = out.mutable_data_ptr();
  check_rows_aligned(kOp, "out", out, out_pointer);
  check_rows_aligned(kOp, "a", a, a.const_data_ptr());
  check_rows_aligned(kOp, "b", b, b.const_data_ptr());
  std::int64_t const element_bytes = fp8 ? 1 : 2;
  std::int64_t const a_rows = row_dim("a", a);
  std::int64_t const out_rows = row_dim("out", out);

  ScaleShape const shape{.kernel = kernel.config,
                         .num_rows = num_rows,
                         .num_groups = num_groups,
                         .max_rows = max_rows,
                         .n = n,
                         .k = k,
                         .n_segments = n_segments,
                         .n_offset = scale_n_offset,
                         .k_offset = scale_k_offset,
                         .device = device};
  TokenScales const token_scales = check_token_scales(scale_a, shape);
  WeightScales const weight_scales = check_weight_scales(scale_b, shape);

  Bias const checked_bias = check_bias(bias, num_groups, n, device);

  if (num_rows == 0) {
    return;
  }
  // The device counts rows, columns and steps in 32 bits, with room for one tile past the end.
  constexpr std::int64_t kMost = std::numeric_limits<int>::max() - 1024;
  check_value(num_rows <= kMost, kOp, ": `a` must have at most ", kMost, " rows, got ", num_rows);
  check_value(n <= kMost, kOp, ": n must be at most ", kMost, ", got ", n);
  check_value(k <= kMost, kOp, ": k must be at most ", kMost, ", got ", k);
  Params params{.a = a.const_data_ptr(),
                .b = b.const_data_ptr(),
                .groups = {.offs = static_cast<int const*>(offs.const_data_ptr()),
                           .num_groups = static_cast<int>(num_groups),
                           .num_rows = static_cast<int>(num_rows),
                           .max_rows = static_cast<int>(max_rows)},
                .scale_a = token_scales,
                .scale_b = weight_scales,
                .bias = checked_bias,
                .out = out_pointer,
                .n = n,
                .k = k,
                .a_row_stride_bytes = stride_bytes(a, a_rows, k * element_bytes),
                .b_row_stride_bytes = stride_bytes(b, 1, k * element_bytes),
                .b_group_stride_bytes = 0,
                .out_row_stride = num_rows > 1 ? out.stride(out_rows) : n,
                .out_dtype = out_type == ScalarType::Float ? OutDtype::FP32 : OutDtype::BF16,
                .offs_ready = offs_ready,
                .sm_count = sm_count(device)};
  params.b_group_stride_bytes = stride_bytes(b, 0, n * params.b_row_stride_bytes);
  check_stride_limit("a", params.a_row_stride_bytes);
  check_stride_limit("b", params.b_row_stride_bytes);
  check_stride_limit("b", params.b_group_stride_bytes);

  DeviceGuard const guard(static_cast<torch::stable::accelerator::DeviceIndex>(device));
  cudaStream_t const stream = current_stream(device);
  if (k == 0) {
    empty_sum(params, stream);
  } else {
    kernel.launch(params, stream);
  }
}

}  // namespace moe_ext::grouped_gemm
