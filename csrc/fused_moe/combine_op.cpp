// Checks, then parameters: from torch tensors to a combination.
#include "fused_moe/combine_op.hpp"

#include <cmath>
#include <limits>

#include "common/cuda_context.hpp"
#include "common/tensor_checks.hpp"
#include "common/tensor_strides.hpp"
#include "fused_moe/combine.hpp"
#include "fused_moe/sort.hpp"

namespace moe_ext::fused_moe {
namespace {

constexpr char const* kOp = "combine_tokens";

CombineType type_of(char const* argument, Tensor const& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16:
      return CombineType::BF16;
    case ScalarType::Float:
      return CombineType::FP32;
    default:
      fail_value(kOp,
                 ": `",
                 argument,
                 "` must have dtype BFloat16 or Float, got ",
                 torch::headeronly::toString(tensor.scalar_type()));
  }
}

/// A matrix whose rows are read 16 bytes at a time. They may lie in one place, if they are only read.
void check_read_rows(char const* argument, Tensor const& tensor, std::int64_t rows, std::int64_t columns) {
  check_rank(kOp, argument, tensor, 2);
  check_size(kOp, argument, 0, tensor.size(0), rows);
  check_size(kOp, argument, 1, tensor.size(1), columns);
  if (rows == 0 || columns == 0) {
    return;  // strides mean nothing
  }
  check_value(columns == 1 || tensor.stride(1) == 1,
              kOp,
              ": `",
              argument,
              "` must be contiguous in its last dimension, got stride ",
              tensor.stride(1));
  auto const bytes = static_cast<std::int64_t>(tensor.element_size());
  std::uintptr_t const address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  check_value(address % 16 == 0 && step(tensor, 0) * bytes % 16 == 0,
              kOp,
              ": `",
              argument,
              "` must have rows at multiples of 16 bytes, got ",
              address % 16,
              " bytes past one and ",
              step(tensor, 0) * bytes,
              " between rows");
}

}  // namespace

CombineParams check_combine(Tensor const& out,
                            std::int64_t top_k,
                            std::optional<Tensor> const& topk_weights,
                            std::optional<Tensor> const& addend,
                            double routed_scale) {
  check_value(out.is_cuda(), kOp, ": `out` must be a CUDA tensor, got another kind of device");
  int const device = out.get_device_index();
  check_value(top_k >= 1 && top_k <= kMaxTopK, kOp, ": `top_k` must be in [1, ", kMaxTopK, "], got ", top_k);
  check_value(std::abs(routed_scale) <= std::numeric_limits<float>::max(),
              kOp,
              ": `routed_scale` must be a number that float32 holds, got ",
              routed_scale);
  check_rank(kOp, "out", out, 2);
  std::int64_t const num_tokens = out.size(0);
  std::int64_t const hidden = out.size(1);
  check_value(hidden % 8 == 0 && hidden <= std::numeric_limits<int>::max(),
              kOp,
              ": `out` must have a multiple of 8 columns below 2^31, got ",
              hidden);
  check_read_rows("out", out, num_tokens, hidden);
  check_value(num_tokens <= 1 || out.stride(0) >= hidden,
              kOp,
              ": `out` must have rows apart from each other, got stride ",
              step(out, 0));
  CombineParams params{.y = nullptr,
                       .y_row_stride = hidden,
                       .num_rows = 0,
                       .slot_row = nullptr,
                       .weights = nullptr,
                       .weights_type = CombineType::FP32,
                       .weights_token_stride = 0,
                       .weights_choice_stride = 0,
                       .addend = nullptr,
                       .addend_type = CombineType::FP32,
                       .addend_row_stride = 0,
                       .out = out.mutable_data_ptr(),
                       .out_type = type_of("out", out),
                       .out_row_stride = step(out, 0),
                       .num_tokens = num_tokens,
                       .top_k = static_cast<int>(top_k),
                       .hidden_size = static_cast<int>(hidden),
                       .routed_scale = static_cast<float>(routed_scale),
                       .programmatic = false,
                       .only_y_is_new = false};
  if (topk_weights.has_value()) {
    check_on_device(kOp, "topk_weights", *topk_weights, device, "out");
    check_rank(kOp, "topk_weights", *topk_weights, 2);
    check_size(kOp, "topk_weights", 0, topk_weights->size(0), num_tokens);
    check_size(kOp, "topk_weights", 1, topk_weights->size(1), top_k);
    params.weights = topk_weights->const_data_ptr();
    params.weights_type = type_of("topk_weights", *topk_weights);
    params.weights_token_stride = step(*topk_weights, 0);
    params.weights_choice_stride = step(*topk_weights, 1);
  }
  if (addend.has_value()) {
    check_on_device(kOp, "addend", *addend, device, "out");
    check_read_rows("addend", *addend, num_tokens, hidden);
    params.addend = addend->const_data_ptr();
    params.addend_type = type_of("addend", *addend);
    params.addend_row_stride = step(*addend, 0);
  }
  return params;
}

void combine_tokens_configured(Tensor const& y,
                               Tensor const& slot_row,
                               std::optional<Tensor> topk_weights,
                               std::optional<Tensor> addend,
                               Tensor const& out,
                               std::int64_t top_k,
                               double routed_scale) {
  CombineParams params = check_combine(out, top_k, topk_weights, addend, routed_scale);
  int const device = out.get_device_index();
  check_on_device(kOp, "y", y, device, "out");
  check_dtype(kOp, "y", y, ScalarType::BFloat16);
  check_rank(kOp, "y", y, 2);
  check_read_rows("y", y, y.size(0), params.hidden_size);
  check_on_device(kOp, "slot_row", slot_row, device, "out");
  check_dtype(kOp, "slot_row", slot_row, ScalarType::Int);
  check_rank(kOp, "slot_row", slot_row, 1);
  check_value(
      slot_row.size(0) <= 1 || slot_row.stride(0) == 1, kOp, ": `slot_row` must be contiguous, got a stride");
  check_value(slot_row.size(0) % top_k == 0 && slot_row.size(0) / top_k == params.num_tokens,
              kOp,
              ": `slot_row` must have `top_k` elements for each of ",
              params.num_tokens,
              " tokens, got ",
              slot_row.size(0));
  params.y = y.const_data_ptr();
  params.y_row_stride = step(y, 0);
  params.num_rows = y.size(0);
  params.slot_row = static_cast<int const*>(slot_row.const_data_ptr());
  DeviceGuard const guard(static_cast<torch::stable::accelerator::DeviceIndex>(device));
  combine(params, current_stream(device));
}

}  // namespace moe_ext::fused_moe
