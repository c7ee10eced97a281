// The parts of a layer's workspace, each checked against its end.
#include "fused_moe/workspace.hpp"

#include "common/tensor_checks.hpp"
#include "fused_moe/workspace_layout.hpp"

namespace moe_ext::fused_moe {
namespace {

constexpr char const* kOp = "fused_moe";

/// Pointers into a workspace, each with as many bytes behind it as its user may touch.
class Parts {
 public:
  Parts(unsigned char* base, std::int64_t bytes) : base_(base), bytes_(bytes) {}

  template <class T>
  T* at(std::int64_t begin, std::int64_t bytes) const {
    check_value(begin <= bytes_ - bytes,
                kOp,
                ": `workspace` must hold every part of its layout, got ",
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
};

}  // namespace

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
          .programmatic = true,
          .dependents_first = false,
          .counted_before = false,
          .beside_previous = false};
}

WorkspaceParts check_workspace(Tensor const& workspace,
                               std::int64_t slots,
                               std::int64_t hidden,
                               std::int64_t intermediate,
                               std::int64_t num_experts,
                               bool fp8,
                               bool apart,
                               int device) {
  check_on_device(kOp, "workspace", workspace, device, "hidden_states");
  check_value(workspace.is_contiguous(), kOp, ": `workspace` must be contiguous, got strides");
  auto* const memory = static_cast<unsigned char*>(workspace.mutable_data_ptr());
  auto const address = reinterpret_cast<std::uintptr_t>(memory);
  auto const skipped =
      static_cast<std::int64_t>((kWorkspaceAlignment - address % kWorkspaceAlignment) % kWorkspaceAlignment);
  std::int64_t const bytes =
      workspace.numel() * static_cast<std::int64_t>(workspace.element_size()) - skipped;
  Parts const parts(memory + skipped, bytes);
  WorkspaceLayout const layout = workspace_layout(slots, hidden, intermediate, num_experts, fp8, apart);

  WorkspaceParts result{};
  result.offs = parts.at<int>(layout.offs, 4 * num_experts);
  result.listed = parts.at<grouped_gemm::ListedRows>(layout.listed, kListBytes);
  result.row_slot = parts.at<int>(layout.row_slot, 4 * slots);
  result.slot_row = parts.at<int>(layout.slot_row, 4 * slots);
  result.sort_scratch = parts.at<int>(layout.gathered, 0);
  result.sort_scratch_elems = (bytes - layout.gathered) / 4;
  result.intermediate = parts.at<void>(layout.intermediate, 2 * slots * intermediate);
  result.rows = parts.at<void>(layout.rows, 2 * slots * hidden);
  int const* const num_rows = result.offs + num_experts - 1;

  GatherParams& gather = result.gather;
  gather = make_stage(num_rows, slots, hidden);
  gather.row_slot = result.row_slot;
  gather.slot_row = result.slot_row;
  std::int64_t const row_bytes = fp8 ? fp8_row_bytes(hidden) : 2 * hidden;
  gather.out = parts.at<void>(layout.gathered, slots * row_bytes);
  gather.out_row_stride = fp8 ? row_bytes : hidden;

  GatherParams& quantize = result.quantize;
  quantize = make_stage(num_rows, slots, intermediate);
  quantize.x = result.intermediate;
  quantize.dependents_first = true;
  quantize.counted_before = true;
  if (fp8) {
    std::int64_t const stride = layout.quantised_row_bytes;
    std::int64_t const scale_stride = layout.quantised_scale_row_bytes;
    quantize.out = parts.at<void>(layout.quantised, (slots - 1) * stride + intermediate);
    quantize.out_row_stride = stride;
    gather.scale = parts.at<float>(layout.gathered_scale, slots * scale_row_bytes(hidden));
    gather.scale_row_stride = scale_row_bytes(hidden) / 4;
    quantize.scale =
        parts.at<float>(layout.quantised_scale, (slots - 1) * scale_stride + scale_row_bytes(intermediate));
    quantize.scale_row_stride = scale_stride / 4;
  }
  return result;
}

}  // namespace moe_ext::fused_moe
