// The ops: one runs a given kernel into a given output, the others find both themselves.
#include "grouped_gemm/op.hpp"

#include "common/cuda_context.hpp"
#include "common/new_tensor.hpp"
#include "common/tensor_checks.hpp"
#include "grouped_gemm/checks.hpp"
#include "grouped_gemm/choices.hpp"
#include "grouped_gemm/empty_sum.hpp"
#include "grouped_gemm/registry.hpp"

namespace moe_ext::grouped_gemm {
namespace {

constexpr char const* kOp = "grouped_gemm";

RegisteredKernel const& kernel_at(std::int64_t config) {
  auto const& kernels = registered_kernels();
  auto const num_kernels = static_cast<std::int64_t>(kernels.size());
  check_value(
      config >= 0 && config < num_kernels, kOp, ": `config` must be in [0, ", num_kernels, "), got ", config);
  return kernels[static_cast<std::size_t>(config)];
}

void enqueue(RegisteredKernel const& kernel, Params const& params) {
  DeviceGuard const guard(static_cast<torch::stable::accelerator::DeviceIndex>(params.device));
  cudaStream_t const stream = current_stream(params.device);
  if (params.k == 0) {
    empty_sum(params, stream);
  } else {
    kernel.launch(params, stream);
  }
}

Tensor new_out(Sizes const& sizes, bool fp32) {
  int const dtype = fp32 ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16();
  std::optional<Tensor> out;
  if (sizes.masked) {
    std::int64_t const shape[] = {sizes.num_groups, sizes.max_rows, sizes.n};
    out = new_empty(shape, dtype, sizes.device);
  } else {
    std::int64_t const shape[] = {sizes.num_rows, sizes.n};
    out = new_empty(shape, dtype, sizes.device);
  }
  // A refusal, so that Python allocates: its exception is torch's own, which callers may wait for.
  check_value(out.has_value(), kOp, ": `out` must be given where there is no memory for it, got none");
  return *std::move(out);
}

}  // namespace

void configured(Tensor const& a,
                Tensor const& b,
                Tensor const& offs,
                std::optional<Tensor> const& scale_a,
                std::optional<Tensor> const& scale_b,
                std::optional<Tensor> const& bias,
                Tensor const& out,
                bool offs_ready,
                std::int64_t n_segments,
                std::int64_t scale_n_offset,
                std::int64_t scale_k_offset,
                std::int64_t config) {
  RegisteredKernel const& kernel = kernel_at(config);
  Call const call{.a = a,
                  .b = b,
                  .offs = offs,
                  .scale_a = scale_a,
                  .scale_b = scale_b,
                  .bias = bias,
                  .offs_ready = offs_ready,
                  .n_segments = n_segments,
                  .n_offset = scale_n_offset,
                  .k_offset = scale_k_offset};
  Sizes const sizes = check_operands(call, kernel.config.dtype);
  Params const params = check_call(call, sizes, kernel.config, out, sm_count(sizes.device));
  if (sizes.num_rows > 0) {
    enqueue(kernel, params);
  }
}

Tensor launch_with(Tensor const& a,
                   Tensor const& b,
                   Tensor const& offs,
                   std::optional<Tensor> const& scale_a,
                   std::optional<Tensor> const& scale_b,
                   std::optional<Tensor> const& bias,
                   std::optional<Tensor> const& out,
                   std::int64_t flags,
                   std::int64_t n_segments,
                   std::int64_t scale_n_offset,
                   std::int64_t scale_k_offset,
                   std::int64_t expected_rows,
                   std::int64_t config) {
  Call call{.a = a,
            .b = b,
            .offs = offs,
            .scale_a = scale_a,
            .scale_b = scale_b,
            .bias = bias,
            .offs_ready = (flags & kOffsReady) != 0,
            .n_segments = n_segments,
            .n_offset = scale_n_offset,
            .k_offset = scale_k_offset};
  // Of another dtype than these two, `a` is refused as one that is not BF16.
  Dtype const dtype = has_dtype(a, ScalarType::Float8_e4m3fn) ? Dtype::FP8 : Dtype::BF16;
  Sizes const sizes = check_operands(call, dtype);
  bool const masked = (flags & kMasked) != 0;
  check_value(
      sizes.masked == masked, kOp, ": `a` must have ", masked ? 3 : 2, " dimensions, got another number");
  check_value(sizes.num_rows > 0 && sizes.n > 0, kOp, ": the result must have elements, got an empty one");

  Kind const kind = kind_of(call, sizes, dtype, (flags & kFast) != 0);
  Problem const problem{.kind = kind,
                        .num_rows = sizes.num_rows,
                        .expected_rows = expected_rows,
                        .num_groups = sizes.num_groups,
                        .n = sizes.n,
                        .k = sizes.k,
                        .sm_count = sm_count(sizes.device)};
  if (config < 0) {
    std::optional<std::int64_t> const known = recall(problem);
    check_value(known.has_value(), kOp, ": `config` must be given for a problem not met before, got none");
    config = *known;
  }
  RegisteredKernel const& kernel = kernel_at(config);
  check_value(serves(kernel.config, kind),
              kOp,
              ": `config` must be a kernel for these operands and scale layouts, got ",
              kernel.config.id);

  if (is_block_scaled(kind.accumulate)) {  // these kernels load both scales
    for (std::optional<Tensor>* const scale : {&call.scale_a, &call.scale_b}) {
      if (!scale->has_value()) {
        *scale = new_one(sizes.device);
      }
    }
  }
  Tensor result = out.has_value() ? *out : new_out(sizes, (flags & kFp32Out) != 0);
  enqueue(kernel, check_call(call, sizes, kernel.config, result, problem.sm_count));
  if ((flags & kRemember) != 0) {
    remember(problem, config);
  }
  return result;
}

Tensor launch(Tensor const& a,
              Tensor const& b,
              Tensor const& offs,
              std::optional<Tensor> const& scale_a,
              std::optional<Tensor> const& scale_b,
              std::optional<Tensor> const& bias,
              std::optional<Tensor> const& out,
              std::int64_t flags) {
  return launch_with(a, b, offs, scale_a, scale_b, bias, out, flags, 1, 0, 0, -1, -1);
}

}  // namespace moe_ext::grouped_gemm
