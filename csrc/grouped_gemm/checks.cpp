// From torch tensors to `Params`: what is found wrong on the way says what was expected and what came.
#include "grouped_gemm/checks.hpp"

#include <limits>

#include "common/tensor_checks.hpp"
#include "grouped_gemm/scales.hpp"

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

OutDtype check_out_dtype(char const* argument, Tensor const& tensor) {
  bool const bf16 = has_dtype(tensor, ScalarType::BFloat16);
  if (!bf16 && !has_dtype(tensor, ScalarType::Float)) [[unlikely]] {
    fail_value(kOp,
               ": `",
               argument,
               "` must have dtype BFloat16 or Float, got ",
               torch::headeronly::toString(tensor.scalar_type()));
  }
  return bf16 ? OutDtype::BF16 : OutDtype::FP32;
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

Bias check_bias(std::optional<Tensor> const& bias, std::int64_t num_groups, std::int64_t n, int device) {
  if (!bias.has_value()) {
    return {};
  }
  check_on_device(kOp, "bias", *bias, device);
  OutDtype const dtype = check_out_dtype("bias", *bias);
  check_rank(kOp, "bias", *bias, 2);
  check_size(kOp, "bias", 0, bias->size(0), num_groups);
  check_size(kOp, "bias", 1, bias->size(1), n);
  return {.data = bias->const_data_ptr(),
          .group_stride = bias->stride(0),
          .n_stride = bias->stride(1),
          .dtype = dtype};
}

Sizes check_operands(Call const& call, Dtype dtype) {
  Tensor const& a = call.a;
  Tensor const& b = call.b;
  Tensor const& offs = call.offs;
  check_value(a.is_cuda(), kOp, ": `a` must be a CUDA tensor, got another kind of device");
  int const device = a.get_device_index();
  check_on_device(kOp, "b", b, device);
  check_on_device(kOp, "offs", offs, device);
  ScalarType const operand = dtype == Dtype::FP8 ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16;
  check_dtype(kOp, "a", a, operand);
  check_dtype(kOp, "b", b, operand);
  check_dtype(kOp, "offs", offs, ScalarType::Int);
  std::int64_t const dims = a.dim();
  bool const masked = dims == 3;
  check_value(dims == 2 || masked, kOp, ": `a` must have 2 dimensions, or 3 if masked, got ", dims);
  check_rank(kOp, "b", b, 3);
  check_rank(kOp, "offs", offs, 1);

  std::int64_t const max_rows = masked ? a.size(1) : 0;
  Sizes const sizes{.masked = masked,
                    .num_rows = masked ? a.size(0) * max_rows : a.size(0),
                    .max_rows = max_rows,
                    .num_groups = b.size(0),
                    .n = b.size(1),
                    .k = a.size(dims - 1),
                    .device = device};
  check_size(kOp, "b", 2, b.size(2), sizes.k);
  check_value(sizes.num_groups >= 1 && sizes.num_groups <= kMaxGroups,
              kOp,
              ": `b` must have 1 to ",
              kMaxGroups,
              " groups, got ",
              sizes.num_groups);
  check_size(kOp, masked ? "counts" : "offs", 0, offs.size(0), sizes.num_groups);
  check_value(
      sizes.num_groups == 1 || offs.stride(0) == 1,
      kOp,
      masked ? ": `counts` must be contiguous, got stride " : ": `offs` must be contiguous, got stride ",
      offs.stride(0));
  if (masked) {
    check_size(kOp, "a", 0, a.size(0), sizes.num_groups);
  }
  check_rows_aligned(kOp, "a", a, a.const_data_ptr());
  check_rows_aligned(kOp, "b", b, b.const_data_ptr());
  return sizes;
}

Params check_call(
    Call const& call, Sizes const& sizes, Config const& kernel, Tensor const& out, int sm_count) {
  Tensor const& a = call.a;
  Tensor const& b = call.b;
  std::int64_t const n = sizes.n;
  std::int64_t const k = sizes.k;
  std::int64_t const num_rows = sizes.num_rows;
  std::int64_t const dims = sizes.masked ? 3 : 2;
  check_on_device(kOp, "out", out, sizes.device);
  check_rank(kOp, "out", out, dims);
  check_size(kOp, "out", 0, out.size(0), a.size(0));
  if (sizes.masked) {
    check_size(kOp, "out", 1, out.size(1), sizes.max_rows);
  }
  check_size(kOp, "out", dims - 1, out.size(dims - 1), n);
  OutDtype const out_dtype = check_out_dtype("out", out);
  std::int64_t const n_multiple = out_dtype == OutDtype::BF16 ? 8 : 4;
  check_value(n >= 1 && n % n_multiple == 0,
              kOp,
              ": n, the rows of `b[g]`, must be a positive multiple of ",
              n_multiple,
              ", got ",
              n);
  void* const out_pointer = out.mutable_data_ptr();
  check_rows_aligned(kOp, "out", out, out_pointer);
  std::int64_t const element_bytes = kernel.dtype == Dtype::FP8 ? 1 : 2;
  std::int64_t const a_rows = row_dim("a", a);
  std::int64_t const out_rows = row_dim("out", out);

  ScaleShape const shape{.kernel = kernel,
                         .num_rows = num_rows,
                         .num_groups = sizes.num_groups,
                         .max_rows = sizes.max_rows,
                         .n = n,
                         .k = k,
                         .n_segments = call.n_segments,
                         .n_offset = call.n_offset,
                         .k_offset = call.k_offset,
                         .device = sizes.device};
  TokenScales const token_scales = check_token_scales(call.scale_a, shape);
  WeightScales const weight_scales = check_weight_scales(call.scale_b, shape);
  Bias const bias = check_bias(call.bias, sizes.num_groups, n, sizes.device);

  // The device counts rows, columns and steps in 32 bits, with room for one tile past the end.
  constexpr std::int64_t kMost = std::numeric_limits<int>::max() - 1024;
  check_value(num_rows <= kMost, kOp, ": `a` must have at most ", kMost, " rows, got ", num_rows);
  check_value(n <= kMost, kOp, ": n must be at most ", kMost, ", got ", n);
  check_value(k <= kMost, kOp, ": k must be at most ", kMost, ", got ", k);
  Params params{.a = a.const_data_ptr(),
                .b = b.const_data_ptr(),
                .groups = {.offs = static_cast<int const*>(call.offs.const_data_ptr()),
                           .num_groups = static_cast<int>(sizes.num_groups),
                           .num_rows = static_cast<int>(num_rows),
                           .max_rows = static_cast<int>(sizes.max_rows)},
                .scale_a = token_scales,
                .scale_b = weight_scales,
                .bias = bias,
                .out = out_pointer,
                .n = n,
                .k = k,
                .a_row_stride_bytes = stride_bytes(a, a_rows, k * element_bytes),
                .b_row_stride_bytes = stride_bytes(b, 1, k * element_bytes),
                .b_group_stride_bytes = 0,
                .out_row_stride = num_rows > 1 ? out.stride(out_rows) : n,
                .out_dtype = out_dtype,
                .wait = call.offs_ready ? Wait::ForTokens : Wait::ForAll,
                .device = sizes.device,
                .sm_count = sm_count};
  params.b_group_stride_bytes = stride_bytes(b, 0, n * params.b_row_stride_bytes);
  check_stride_limit("a", params.a_row_stride_bytes);
  check_stride_limit("b", params.b_row_stride_bytes);
  check_stride_limit("b", params.b_group_stride_bytes);
  return params;
}

}  // namespace moe_ext::grouped_gemm
