// The parts of a layer's workspace, each checked against its end.
#include "fused_moe/workspace.hpp"

#include "common/math.hpp"
#include "common/tensor_checks.hpp"

namespace moe_ext::fused_moe {
namespace {

constexpr char const* kOp = "fused_moe";
constexpr std::int64_t kAlignment = 256;
constexpr std::int64_t kScaleBlock = 128;
/// Of the scratch for what does not grow with the tokens: a scale of each stage, then partial maxima.
constexpr std::int64_t kScratchBytes = 64 * 1024;
constexpr std::int64_t kPartialsBegin = 256;
constexpr int kPartials = 512;  // every CTA of the stage behind reads all of them

/// Fields of WorkspaceLayout in order.
enum Field {
  kOffs,
  kRowSlot,
  kSlotRow,
  kScratch,
  kGathered,
  kGatheredScale,
  kIntermediate,
  kQuantised,
  kQuantisedRowBytes,
  kQuantisedScale,
  kQuantisedScaleRowBytes,
  kInPlaceField,
  kRows,
  kTotal,
  kNumFields
};

/// Pointers into a workspace, each with as many bytes behind it as its user may touch.
class Parts {
 public:
  Parts(unsigned char* base, std::int64_t bytes, std::vector<std::int64_t> const& layout)
      : base_(base), bytes_(bytes), layout_(layout) {}

  template <class T>
  T* at(Field field, std::int64_t bytes) const {
    std::int64_t const begin = layout_[field];
    check_value(begin >= 0 && begin % 4 == 0 && bytes >= 0 && begin <= bytes_ - bytes,
                kOp,
                ": `workspace` must hold every part of `layout`, got ",
                bytes_,
                " bytes for a part of ",
                bytes,
                " at ",
                begin);
    return reinterpret_cast<T*>(base_ + begin);
  }

 private:
  unsigned char* base_;
  std::int64_t bytes_;
  std::vector<std::int64_t> const& layout_;
};

GatherParams make_stage(int const* num_rows, std::int64_t slots, std::int64_t columns) {
  return {.x = nullptr,
          .x_row_stride = columns,
          .num_tokens = slots,
          .hidden_size = static_cast<int>(columns),
          .row_slot = nullptr,
          .slot_row = nullptr,
          .top_k = 1,
          .num_rows = num_rows,
          .max_rows = static_cast<int>(slots),
          .weights = nullptr,
          .weights_type = GatherWeights::None,
          .weights_token_stride = 0,
          .weights_choice_stride = 0,
          .format = GatherFormat::BF16,
          .out = nullptr,
          .out_row_stride = columns,
          .scale = nullptr,
          .scale_row_stride = 0,
          .static_scale = nullptr,
          .partials = nullptr,
          .num_partials = 0,
          .programmatic = true,
          .dependents_first = false};
}

}  // namespace

WorkspaceParts check_workspace(Tensor const& workspace,
                               std::vector<std::int64_t> const& layout,
                               std::int64_t slots,
                               std::int64_t hidden,
                               std::int64_t intermediate,
                               std::int64_t num_experts,
                               bool fp8,
                               int device) {
  check_value(layout.size() == kNumFields,
              kOp,
              ": `layout` must have ",
              int{kNumFields},
              " fields, got ",
              layout.size());
  check_on_device(kOp, "workspace", workspace, device, "hidden_states");
  check_value(workspace.is_contiguous(), kOp, ": `workspace` must be contiguous, got strides");
  auto* const memory = static_cast<unsigned char*>(workspace.mutable_data_ptr());
  auto const address = reinterpret_cast<std::uintptr_t>(memory);
  auto const skipped = static_cast<std::int64_t>((kAlignment - address % kAlignment) % kAlignment);
  std::int64_t const bytes =
      workspace.numel() * static_cast<std::int64_t>(workspace.element_size()) - skipped;
  Parts const parts(memory + skipped, bytes, layout);

  WorkspaceParts result{};
  result.offs = parts.at<int>(kOffs, 4 * num_experts);
  result.row_slot = parts.at<int>(kRowSlot, 4 * slots);
  result.slot_row = parts.at<int>(kSlotRow, 4 * slots);
  result.sort_scratch = parts.at<int>(kGathered, 0);
  result.sort_scratch_elems = (bytes - layout[kGathered]) / 4;
  result.intermediate = parts.at<void>(kIntermediate, 2 * slots * intermediate);
  result.rows = parts.at<void>(kRows, 2 * slots * hidden);
  auto* const scratch = parts.at<float>(kScratch, kScratchBytes);
  int const* const num_rows = result.offs + num_experts - 1;

  GatherParams& gather = result.gather;
  gather = make_stage(num_rows, slots, hidden);
  gather.row_slot = result.row_slot;
  gather.slot_row = result.slot_row;
  std::int64_t const row_bytes = fp8 ? ceil_div(hidden, 16) * 16 : 2 * hidden;
  gather.out = parts.at<void>(kGathered, slots * row_bytes);
  gather.out_row_stride = fp8 ? row_bytes : hidden;
  gather.partials = scratch + kPartialsBegin / 4;
  gather.num_partials = kPartials;

  GatherParams& quantize = result.quantize;
  quantize = make_stage(num_rows, slots, intermediate);
  quantize.x = result.intermediate;
  quantize.partials = scratch + kPartialsBegin / 4;
  quantize.num_partials = kPartials;
  quantize.dependents_first = true;
  if (fp8) {
    std::int64_t const stride = layout[kQuantisedRowBytes];
    std::int64_t const scale_stride = layout[kQuantisedScaleRowBytes];
    std::int64_t const blocks = ceil_div(intermediate, kScaleBlock);
    check_value(
        stride >= intermediate && stride % 16 == 0 && scale_stride >= 4 * blocks && scale_stride % 4 == 0,
        kOp,
        ": `layout` must have room for rows and scales, got strides of ",
        stride,
        " and ",
        scale_stride,
        " bytes");
    quantize.out = parts.at<void>(kQuantised, (slots - 1) * stride + intermediate);
    quantize.out_row_stride = stride;
    gather.scale = parts.at<float>(kGatheredScale, 4 * slots * ceil_div(hidden, kScaleBlock));
    gather.scale_row_stride = ceil_div(hidden, kScaleBlock);
    quantize.scale = parts.at<float>(kQuantisedScale, (slots - 1) * scale_stride + 4 * blocks);
    quantize.scale_row_stride = scale_stride / 4;
  }
  return result;
}

}  // namespace moe_ext::fused_moe
