// Checks, then parameters: from torch tensors to one launch.
#include "grouped_gemm/op.hpp"

#include <limits>

#include "common/cuda_context.hpp"
#include "common/tensor_checks.hpp"
#include "grouped_gemm/registry.hpp"
#include "grouped_gemm/scales.hpp"
#include "grouped_gemm/tiling.hpp"
#include "grouped_gemm/zero_rows.hpp"

namespace moe_ext::grouped_gemm {
namespace {

constexpr char const* kOp = "grouped_gemm";
constexpr std::int64_t kMaxGroups = 4096;

/// A row stride that TMA accepts even where there is only one row and torch may say anything.
std::int64_t stride_bytes(Tensor const& tensor, std::int64_t dim, std::int64_t inner_bytes) {
  std::int64_t const dense = (inner_bytes + 15) / 16 * 16;
  return tensor.size(dim) > 1 ? tensor.stride(dim) * static_cast<std::int64_t>(tensor.element_size()) : dense;
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
                Tensor const& out,
                bool offs_ready,
                std::int64_t n_segments,
                std::int64_t scale_n_offset,
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
  check_rank(kOp, "a", a, 2);
  check_rank(kOp, "b", b, 3);
  check_rank(kOp, "offs", offs, 1);
  check_rank(kOp, "out", out, 2);

  std::int64_t const num_rows = a.size(0);
  std::int64_t const k = a.size(1);
  std::int64_t const num_groups = b.size(0);
  std::int64_t const n = b.size(1);
  check_size(kOp, "b", 2, b.size(2), k);
  check_value(num_groups >= 1 && num_groups <= kMaxGroups,
              kOp,
              ": `b` must have 1 to ",
              kMaxGroups,
              " groups, got ",
              num_groups);
  check_size(kOp, "offs", 0, offs.size(0), num_groups);
  check_value(num_groups == 1 || offs.stride(0) == 1,
              kOp,
              ": `offs` must be contiguous, got stride ",
              offs.stride(0));
  check_size(kOp, "out", 0, out.size(0), num_rows);
  check_size(kOp, "out", 1, out.size(1), n);

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
  check_value(k * element_bytes % 16 == 0,
              kOp,
              ": k must be a multiple of ",
              16 / element_bytes,
              " (16 bytes), got ",
              k);

  ScaleShape const shape{.kernel = kernel.config,
                         .num_rows = num_rows,
                         .num_groups = num_groups,
                         .n = n,
                         .k = k,
                         .n_segments = n_segments,
                         .n_offset = scale_n_offset,
                         .device = device};
  TokenScales const token_scales = check_token_scales(scale_a, shape);
  WeightScales const weight_scales = check_weight_scales(scale_b, shape);

  if (num_rows == 0) {
    return;
  }
  Params params{.a = a.const_data_ptr(),
                .b = b.const_data_ptr(),
                .offs = static_cast<int const*>(offs.const_data_ptr()),
                .scale_a = token_scales,
                .scale_b = weight_scales,
                .out = out_pointer,
                .num_rows = num_rows,
                .num_groups = num_groups,
                .n = n,
                .k = k,
                .a_row_stride_bytes = stride_bytes(a, 0, k * element_bytes),
                .b_row_stride_bytes = stride_bytes(b, 1, k * element_bytes),
                .b_group_stride_bytes = 0,
                .out_row_stride = num_rows > 1 ? out.stride(0) : n,
                .out_dtype = out_type == ScalarType::Float ? OutDtype::FP32 : OutDtype::BF16,
                .offs_ready = offs_ready,
                .sm_count = sm_count(device)};
  params.b_group_stride_bytes = stride_bytes(b, 0, n * params.b_row_stride_bytes);
  check_stride_limit("a", params.a_row_stride_bytes);
  check_stride_limit("b", params.b_row_stride_bytes);
  check_stride_limit("b", params.b_group_stride_bytes);
  // The device counts rows, columns and steps in 32 bits, with room for one tile past the end.
  constexpr std::int64_t kMost = std::numeric_limits<int>::max() - 1024;
  check_value(num_rows <= kMost, kOp, ": `a` must have at most ", kMost, " rows, got ", num_rows);
  check_value(n <= kMost, kOp, ": n must be at most ", kMost, ", got ", n);
  check_value(k <= kMost, kOp, ": k must be at most ", kMost, ", got ", k);

  DeviceGuard const guard(static_cast<torch::stable::accelerator::DeviceIndex>(device));
  cudaStream_t const stream = current_stream(device);
  if (k == 0) {
    zero_rows(params, stream);
  } else {
    kernel.launch(params, stream);
  }
}

}  // namespace moe_ext::grouped_gemm
