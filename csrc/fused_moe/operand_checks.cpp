// What the operands of a layer must be, whichever of the ops they come to.
#include "fused_moe/operand_checks.hpp"

#include <limits>

#include "common/tensor_checks.hpp"
#include "fused_moe/op.hpp"
#include "fused_moe/sort.hpp"

namespace moe_ext::fused_moe {
namespace {

constexpr char const* kOp = "fused_moe";
constexpr std::int64_t kMost = std::numeric_limits<int>::max() - (1 << 16);
/// Fewer than a sort can take: MAX_SLOTS of python/moe_ext/_fused_moe_workspace.py.
constexpr std::int64_t kMostSlots = std::int64_t{1} << 22;

}  // namespace

std::int64_t first_rows(Form const& form, std::int64_t flags) {
  return form.intermediate * ((flags & kUngated) != 0 ? 1 : 2);
}

void check_weight(
    char const* argument, Tensor const& weight, Form const& form, std::int64_t n, std::int64_t k) {
  check_on_device(kOp, argument, weight, form.device, "hidden_states");
  check_dtype(kOp, argument, weight, form.fp8 ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16);
  check_size(kOp, argument, 0, weight.size(0), form.num_experts);
  check_size(kOp, argument, 1, weight.size(1), n);
  check_size(kOp, argument, 2, weight.size(2), k);
  check_rows_aligned(kOp, argument, weight, weight.const_data_ptr());
}

WeightScale check_weight_scale(char const* argument,
                               std::optional<Tensor> const& scale,
                               Tensor const& weight,
                               bool fp8) {
  check_value(scale.has_value() == fp8,
              kOp,
              ": `",
              argument,
              "` must be given for float8_e4m3fn weights and only then, got the other");
  if (!fp8) {
    return {};
  }
  auto const shape = scale->sizes();
  std::optional<WeightScale> const layout =
      weight_scale_of({shape.data(), shape.size()}, weight.size(0), weight.size(1), weight.size(2));
  check_value(
      layout.has_value(), kOp, ": `", argument, "` must have a shape that fits its weight, got another");
  return *layout;
}

void check_slots(Form const& form) {
  check_value(form.top_k >= 1 && form.top_k <= kMaxTopK && form.num_tokens <= kMostSlots / form.top_k,
              kOp,
              ": `topk_ids` must have 1 to ",
              kMaxTopK,
              " columns and at most ",
              kMostSlots,
              " elements, got shape (",
              form.num_tokens,
              ", ",
              form.top_k,
              ")");
}

int const* check_expert_ints(char const* op, char const* argument, Tensor const& tensor, Form const& form) {
  check_on_device(op, argument, tensor, form.device, "hidden_states");
  check_dtype(op, argument, tensor, ScalarType::Int);
  check_rank(op, argument, tensor, 1);
  check_size(op, argument, 0, tensor.size(0), form.num_experts);
  check_value(form.num_experts == 1 || tensor.stride(0) == 1,
              op,
              ": `",
              argument,
              "` must be contiguous, got stride ",
              tensor.stride(0));
  return static_cast<int const*>(tensor.const_data_ptr());
}

void check_map(std::optional<Tensor> const& expert_map, std::int64_t first_expert) {
  check_value(!expert_map.has_value() || (first_expert == 0 && expert_map->numel() > 0),
              kOp,
              ": `expert_map` must have elements and no `first_expert` beside it, got ",
              first_expert);
}

void check_addend(std::optional<Tensor> const& addend) {
  if (addend.has_value()) {
    check_rank(kOp, "addend", *addend, 2);
    check_rows_aligned(kOp, "addend", *addend, addend->const_data_ptr());
  }
}

void check_out(Tensor const& out, Form const& form) {
  check_on_device(kOp, "out", out, form.device, "hidden_states");
  check_dtype(kOp, "out", out, ScalarType::BFloat16);
  check_rank(kOp, "out", out, 2);
  check_size(kOp, "out", 0, out.size(0), form.num_tokens);
  check_size(kOp, "out", 1, out.size(1), form.hidden);
  check_rows_aligned(kOp, "out", out, out.mutable_data_ptr());
}

void check_sizes(Form const& form, std::int64_t flags) {
  check_value(form.hidden > 0 && form.hidden % 8 == 0 && form.hidden <= kMost && form.intermediate > 0 &&
                  form.intermediate % 8 == 0 && form.intermediate <= kMost / 2,
              kOp,
              ": hidden and intermediate size must be positive multiples of 8, got ",
              form.hidden,
              " and ",
              form.intermediate);
  bool const ungated = (flags & kUngated) != 0;
  bool const interleaved = (flags & kInterleaved) != 0;
  check_value(!ungated || !interleaved, kOp, ": `flags` must not say interleaved and ungated, got both");
}

void check_layouts(Form const& form, std::int64_t flags) {
  bool const ungated = (flags & kUngated) != 0;
  bool const interleaved = (flags & kInterleaved) != 0;
  check_value(form.w2_scale.n_segments == 1 && (form.w13_scale.n_segments == 1 || (!ungated && !interleaved)),
              kOp,
              ": scales must have one grid of blocks unless gate rows lie before up rows, got two");
  bool const blocks = form.w13_scale.granularity == Granularity::RowBlocks ||
                      form.w2_scale.granularity == Granularity::RowBlocks;
  check_value((flags & kFast) == 0 || (form.fp8 && !blocks),
              kOp,
              ": `accumulate` must be \"promoted\" for bfloat16 or with scales per block, got \"fast\"");
}

void check_weights(Form& form, Experts const& experts, std::int64_t flags) {
  check_sizes(form, flags);
  check_weight("w13", experts.w13, form, first_rows(form, flags), form.hidden);
  check_weight("w2", experts.w2, form, form.hidden, form.intermediate);
  form.w13_scale = check_weight_scale("w13_scale", experts.w13_scale, experts.w13, form.fp8);
  form.w2_scale = check_weight_scale("w2_scale", experts.w2_scale, experts.w2, form.fp8);
  check_layouts(form, flags);
}

}  // namespace moe_ext::fused_moe
