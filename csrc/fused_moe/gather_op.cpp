// Checks, then parameters: from torch tensors to a gather.
#include "fused_moe/gather_op.hpp"

#include <limits>

#include "common/cuda_context.hpp"
#include "common/math.hpp"
#include "common/tensor_checks.hpp"
#include "common/tensor_strides.hpp"
#include "fused_moe/gather.hpp"
#include "fused_moe/sort.hpp"

namespace moe_ext::fused_moe {
namespace {

constexpr char const* kOp = "gather_quantize";
constexpr std::int64_t kMostRows = std::numeric_limits<int>::max() - (1 << 16);
constexpr std::int64_t kScaleBlock = 128;

void check_operand(char const* argument, Tensor const& tensor, int device, ScalarType dtype) {
  check_on_device(kOp, argument, tensor, device, "x");
  check_dtype(kOp, argument, tensor, dtype);
}

/// A tensor that must be there, or must not, as the format has it.
Tensor const* expected(char const* argument, std::optional<Tensor> const& tensor, bool needed) {
  check_value(tensor.has_value() == needed,
              kOp,
              ": `",
              argument,
              "` must be ",
              needed ? "given" : "absent",
              " for this `format`, got ",
              needed ? "none" : "a tensor");
  return needed ? &*tensor : nullptr;
}

void check_one(char const* argument, Tensor const& tensor) {
  check_value(tensor.dim() == 0 || (tensor.dim() == 1 && tensor.size(0) == 1),
              kOp,
              ": `",
              argument,
              "` must have shape () or (1,), got ",
              tensor.dim(),
              " dimensions");
}

void set_scale(GatherParams& params, Tensor const& scale, int device) {
  check_operand("scale", scale, device, ScalarType::Float);
  params.scale = static_cast<float*>(scale.mutable_data_ptr());
  bool const blocks = params.format == GatherFormat::RowBlocks;
  check_rank(kOp, "scale", scale, blocks ? 2 : 1);
  check_size(kOp, "scale", 0, scale.size(0), params.max_rows);
  params.scale_row_stride = step(scale, 0);
  if (!blocks) {
    return;
  }
  std::int64_t const columns = ceil_div(params.hidden_size, kScaleBlock);
  check_size(kOp, "scale", 1, scale.size(1), columns);
  check_value(columns <= 1 || scale.stride(1) == 1,
              kOp,
              ": `scale` must be contiguous in its last dimension, got stride ",
              scale.stride(1));
}

void set_slot_row(GatherParams& params, Tensor const& slot_row, int device) {
  check_value(params.top_k <= kMaxTopK,
              kOp,
              ": `top_k` must be at most ",
              kMaxTopK,
              " with `slot_row`, got ",
              params.top_k);
  check_operand("slot_row", slot_row, device, ScalarType::Int);
  check_rank(kOp, "slot_row", slot_row, 1);
  std::int64_t const slots = slot_row.size(0);
  check_value(params.num_tokens <= kMaxSlots / params.top_k,
              kOp,
              ": `x` must have at most ",
              kMaxSlots / params.top_k,
              " rows for this `top_k`, got ",
              params.num_tokens);
  check_size(kOp, "slot_row", 0, slots, params.num_tokens * params.top_k);
  check_value(slots <= 1 || slot_row.stride(0) == 1, kOp, ": `slot_row` must be contiguous, got a stride");
  params.slot_row = static_cast<int const*>(slot_row.const_data_ptr());
}

}  // namespace

void set_weights(GatherParams& params, Tensor const& weights, int device) {
  check_on_device(kOp, "topk_weights", weights, device, "x");
  ScalarType const type = weights.scalar_type();
  check_value(type == ScalarType::BFloat16 || type == ScalarType::Float,
              kOp,
              ": `topk_weights` must have dtype BFloat16 or Float, got ",
              torch::headeronly::toString(type));
  check_rank(kOp, "topk_weights", weights, 2);
  check_size(kOp, "topk_weights", 0, weights.size(0), params.num_tokens);
  check_size(kOp, "topk_weights", 1, weights.size(1), params.top_k);
  params.weights = weights.const_data_ptr();
  params.weights_type = type == ScalarType::Float ? GatherWeights::FP32 : GatherWeights::BF16;
  params.weights_token_stride = step(weights, 0);
  params.weights_choice_stride = step(weights, 1);
}

void gather_quantize_configured(Tensor const& x,
                                std::optional<Tensor> row_slot,
                                std::optional<Tensor> num_rows,
                                std::optional<Tensor> topk_weights,
                                Tensor const& out,
                                std::optional<Tensor> scale,
                                std::optional<Tensor> static_scale,
                                std::int64_t top_k,
                                std::int64_t format_number,
                                bool programmatic,
                                std::optional<Tensor> slot_row) {
  check_value(format_number >= 0 && format_number <= static_cast<std::int64_t>(GatherFormat::RowBlocks),
              kOp,
              ": `format` must be in [0, 3], got ",
              format_number);
  auto const format = static_cast<GatherFormat>(format_number);
  bool const fp8 = format != GatherFormat::BF16;
  check_value(x.is_cuda(), kOp, ": `x` must be a CUDA tensor, got another kind of device");
  int const device = x.get_device_index();
  check_dtype(kOp, "x", x, ScalarType::BFloat16);
  check_operand("out", out, device, fp8 ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16);
  check_rank(kOp, "x", x, 2);
  check_rank(kOp, "out", out, 2);
  std::int64_t const num_tokens = x.size(0);
  std::int64_t const hidden = x.size(1);
  std::int64_t const rows = out.size(0);
  check_size(kOp, "out", 1, out.size(1), hidden);
  check_value(hidden > 0 && hidden % 8 == 0 && hidden <= std::numeric_limits<int>::max(),
              kOp,
              ": `x` must have a positive multiple of 8 columns below 2^31, got ",
              hidden);
  check_value(rows <= kMostRows, kOp, ": `out` must have at most ", kMostRows, " rows, got ", rows);
  bool const by_token = slot_row.has_value() && !topk_weights.has_value();
  check_value(
      top_k >= 1 && top_k <= kMostRows && (row_slot.has_value() || by_token || top_k == 1),
      kOp,
      ": `top_k` must be at least 1, and 1 if neither `row_slot` nor `slot_row` says what rows are, got ",
      top_k);
  check_rows_aligned(kOp, "x", x, x.const_data_ptr());
  check_rows_aligned(kOp, "out", out, out.const_data_ptr());
  GatherParams params{.x = x.const_data_ptr(),
                      .x_row_stride = step(x, 0),
                      .num_tokens = num_tokens,
                      .hidden_size = static_cast<int>(hidden),
                      .row_slot = nullptr,
                      .slot_row = nullptr,
                      .top_k = static_cast<int>(top_k),
                      .num_rows = nullptr,
                      .max_rows = static_cast<int>(rows),
                      .weights = nullptr,
                      .weights_type = GatherWeights::None,
                      .weights_token_stride = 0,
                      .weights_choice_stride = 0,
                      .format = format,
                      .out = out.mutable_data_ptr(),
                      .out_row_stride = step(out, 0),
                      .scale = nullptr,
                      .scale_row_stride = 0,
                      .static_scale = nullptr,
                      .programmatic = programmatic,
                      .dependents_first = false,
                      .counted_before = false,
                      .beside_previous = false};
  if (row_slot.has_value()) {
    check_operand("row_slot", *row_slot, device, ScalarType::Int);
    check_rank(kOp, "row_slot", *row_slot, 1);
    check_size(kOp, "row_slot", 0, row_slot->size(0), rows);
    check_value(rows <= 1 || row_slot->stride(0) == 1, kOp, ": `row_slot` must be contiguous, got a stride");
    params.row_slot = static_cast<int const*>(row_slot->const_data_ptr());
  }
  if (slot_row.has_value()) {
    set_slot_row(params, *slot_row, device);
  }
  if (num_rows.has_value()) {
    check_operand("num_rows", *num_rows, device, ScalarType::Int);
    check_one("num_rows", *num_rows);
    params.num_rows = static_cast<int const*>(num_rows->const_data_ptr());
  }
  if (topk_weights.has_value()) {
    set_weights(params, *topk_weights, device);
  }
  bool const computed = fp8 && format != GatherFormat::StaticScale;
  if (Tensor const* const own = expected("scale", scale, computed)) {
    set_scale(params, *own, device);
  }
  if (Tensor const* const given =
          expected("static_scale", static_scale, format == GatherFormat::StaticScale)) {
    check_operand("static_scale", *given, device, ScalarType::Float);
    check_one("static_scale", *given);
    params.static_scale = static_cast<float const*>(given->const_data_ptr());
  }
  DeviceGuard const guard(static_cast<torch::stable::accelerator::DeviceIndex>(device));
  gather_quantize(params, current_stream(device));
}

}  // namespace moe_ext::fused_moe
