// Scratch memory of a layer of experts in two precisions: how much, and what lies where in it. Its size has a twin in
// python/moe_ext/_fused_moe_workspace.py, which tests/test_fused_moe_twins.py holds equal. Host arithmetic alone.
#pragma once

#include "fused_moe/workspace_layout.hpp"

namespace moe_ext::fused_moe {

/// Where each part begins, in bytes from the workspace's first aligned byte. A row of `rows` or `intermediate` is one
/// of BF16, or in its place one of FP8 with its scales behind it: which of the two, its expert says (of few slots the
/// intermediate always of BF16).
struct MixedWorkspaceLayout {
  std::int64_t offs;          // (num_experts,) int32
  std::int64_t listed;        // (kMaxFewSlots,) ListedRows
  std::int64_t row_slot;      // (slots,) int32
  std::int64_t slot_row;      // (slots,) int32
  std::int64_t tokens;        // (num_tokens, hidden) FP8, where gate_up of FP8 finds its rows itself
  std::int64_t token_scale;   // at most (num_tokens, ceil(hidden / 128)) fp32, contiguous
  std::int64_t rows;          // (slots, hidden), for gate_up; from when that has ended, what down makes
  std::int64_t intermediate;  // (slots, intermediate)
  // Of few slots the intermediate in FP8 lies here: its own place takes another kernel than the tokens did, whose code
  // would have to be fetched.
  std::int64_t quantised;        // (kMostSlotsApart, intermediate) FP8
  std::int64_t quantised_scale;  // at most (kMostSlotsApart, ceil(intermediate / 128)) fp32
  std::int64_t total;            // bytes in all
};

inline constexpr std::int64_t kMostSlotsApart = 512;

/// An FP8 row and its scales take no more than a BF16 row.
static_assert(8 + scale_row_bytes(8) <= 2 * 8 && 136 + scale_row_bytes(136) <= 2 * 136);

constexpr MixedWorkspaceLayout mixed_workspace_layout(std::int64_t num_tokens,
                                                      std::int64_t top_k,
                                                      std::int64_t hidden,
                                                      std::int64_t intermediate,
                                                      std::int64_t num_experts) {
  std::int64_t const slots = num_tokens * top_k;
  MixedWorkspaceLayout result{};
  result.listed = workspace_aligned(4 * num_experts);
  result.row_slot = result.listed + kListBytes;
  result.slot_row = result.row_slot + workspace_aligned(4 * slots);
  result.tokens = result.slot_row + workspace_aligned(4 * slots);
  result.token_scale = result.tokens + workspace_aligned(fp8_row_bytes(hidden) * num_tokens);
  result.rows = result.token_scale + workspace_aligned(scale_row_bytes(hidden) * num_tokens);
  result.intermediate = result.rows + workspace_aligned(2 * hidden * slots);
  // Not fewer for more slots, so that a workspace for these serves those.
  std::int64_t const apart = std::min(slots, kMostSlotsApart);
  result.quantised = result.intermediate + workspace_aligned(2 * intermediate * slots);
  result.quantised_scale = result.quantised + workspace_aligned(fp8_row_bytes(intermediate) * apart);
  result.total = result.quantised_scale + workspace_aligned(scale_row_bytes(intermediate) * apart);
  return result;
}

/// Wherever the workspace begins: what a caller's own has to have.
constexpr std::int64_t mixed_workspace_bytes(std::int64_t num_tokens,
                                             std::int64_t top_k,
                                             std::int64_t hidden,
                                             std::int64_t intermediate,
                                             std::int64_t num_experts) {
  return kWorkspaceAlignment +
         mixed_workspace_layout(num_tokens, top_k, hidden, intermediate, num_experts).total;
}

}  // namespace moe_ext::fused_moe
