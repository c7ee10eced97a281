// The parts of a workspace of a layer of experts in two precisions, within what there is.
#include "fused_moe/mixed_memory.hpp"

#include "common/tensor_checks.hpp"
#include "fused_moe/mixed_workspace.hpp"
#include "fused_moe/sort.hpp"

namespace moe_ext::fused_moe {
namespace {

constexpr char const* kOp = "fused_moe_mixed";

}  // namespace

MixedMemory check_memory(Tensor const& workspace, Form const& form) {
  check_on_device(kOp, "workspace", workspace, form.device, "hidden_states");
  check_value(workspace.is_contiguous(), kOp, ": `workspace` must be contiguous, got strides");
  std::int64_t const bytes = workspace.numel() * static_cast<std::int64_t>(workspace.element_size());
  std::int64_t const sizes[] = {
      form.num_tokens, form.top_k, form.hidden, form.intermediate, form.num_experts};
  std::int64_t const needed = mixed_workspace_bytes(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]);
  check_value(bytes >= needed, kOp, ": `workspace` must have at least ", needed, " bytes, got ", bytes);
  MixedWorkspaceLayout const layout =
      mixed_workspace_layout(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]);
  auto* const data = static_cast<unsigned char*>(workspace.mutable_data_ptr());
  auto const address = reinterpret_cast<std::uintptr_t>(data);
  unsigned char* const base =
      data + (kWorkspaceAlignment - address % kWorkspaceAlignment) % kWorkspaceAlignment;
  std::int64_t const scratch_elems = (layout.total - layout.rows) / 4;
  check_value(sort_scratch_elems(form.slots(), static_cast<int>(form.num_experts)) <= scratch_elems,
              kOp,
              ": `workspace` must have room for sorting, got less");
  return {.offs = reinterpret_cast<int*>(base + layout.offs),
          .listed = reinterpret_cast<grouped_gemm::ListedRows*>(base + layout.listed),
          .row_slot = reinterpret_cast<int*>(base + layout.row_slot),
          .slot_row = reinterpret_cast<int*>(base + layout.slot_row),
          .tokens = base + layout.tokens,
          .token_scale = reinterpret_cast<float*>(base + layout.token_scale),
          .rows = base + layout.rows,
          .intermediate = base + layout.intermediate,
          .quantised = base + layout.quantised,
          .quantised_scale = reinterpret_cast<float*>(base + layout.quantised_scale)};
}

}  // namespace moe_ext::fused_moe
