// Scratch memory of a layer: how much, and what lies where in it. The twin of python/moe_ext/_fused_moe_workspace.py,
// which explains it and which tests/test_fused_moe_twins.py holds equal. Host arithmetic alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/math.hpp"
#include "fused_moe/sort_plan.hpp"
#include "grouped_gemm/tiling.hpp"

namespace moe_ext::fused_moe {

/// Bytes that each part begins at a multiple of.
inline constexpr std::int64_t kWorkspaceAlignment = 256;

/// Of a list of the rows of few slots.
inline constexpr std::int64_t kListBytes = sizeof(grouped_gemm::ListedRows) * kMaxFewSlots;
static_assert(kListBytes % kWorkspaceAlignment == 0);

/// Where each part begins, in bytes from the workspace's first aligned byte.
struct WorkspaceLayout {
  std::int64_t offs;                       // (num_experts,) int32
  std::int64_t listed;                     // (kMaxFewSlots,) ListedRows
  std::int64_t row_slot;                   // (slots,) int32
  std::int64_t slot_row;                   // (slots,) int32
  std::int64_t gathered;                   // (slots, hidden) BF16, or FP8 with rows of a multiple of 16 bytes
  std::int64_t gathered_scale;             // FP8 only: at most (slots, ceil(hidden / 128)) fp32, contiguous
  std::int64_t intermediate;               // (slots, intermediate) BF16, contiguous
  std::int64_t quantised;                  // FP8 only: (slots, intermediate) FP8
  std::int64_t quantised_row_bytes;        // between its rows
  std::int64_t quantised_scale;            // FP8 only: at most (slots, ceil(intermediate / 128)) fp32
  std::int64_t quantised_scale_row_bytes;  // between its rows
  bool in_place;                           // `quantised` lies on `intermediate`, row by row, or in its place
  std::int64_t rows;                       // (slots, hidden) BF16, contiguous
  std::int64_t total;                      // bytes in all
};

constexpr std::int64_t workspace_aligned(std::int64_t bytes) {
  return ceil_div(bytes, kWorkspaceAlignment) * kWorkspaceAlignment;
}

/// A row of FP8 as TMA wants it.
constexpr std::int64_t fp8_row_bytes(std::int64_t columns) {
  return ceil_div(columns, 16) * 16;
}

constexpr std::int64_t scale_row_bytes(std::int64_t columns) {
  return 4 * ceil_div(columns, grouped_gemm::kScaleBlock);
}

/// `apart`: of FP8, the first GEMM quantises what it makes, which then must not lie where it reads.
constexpr WorkspaceLayout workspace_layout(std::int64_t slots,
                                           std::int64_t hidden,
                                           std::int64_t intermediate,
                                           std::int64_t num_experts,
                                           bool fp8,
                                           bool apart = false) {
  WorkspaceLayout result{};
  result.offs = 0;
  result.listed = result.offs + workspace_aligned(4 * num_experts);
  result.row_slot = result.listed + kListBytes;
  result.slot_row = result.row_slot + workspace_aligned(4 * slots);
  std::int64_t const first = result.slot_row + workspace_aligned(4 * slots);
  std::int64_t const hidden_bytes = workspace_aligned(2 * hidden * slots);
  std::int64_t const middle_bytes = workspace_aligned(2 * intermediate * slots);
  result.gathered = first;
  if (!fp8) {
    std::int64_t const second = first + hidden_bytes;
    result.gathered_scale = second;
    result.intermediate = second;
    result.quantised = second;
    result.quantised_row_bytes = 2 * intermediate;
    result.quantised_scale = second;
    result.rows = first;
    result.total = second + middle_bytes;
    return result;
  }
  std::int64_t const gathered_bytes = workspace_aligned(fp8_row_bytes(hidden) * slots);
  std::int64_t const gathered_end =
      first + gathered_bytes + workspace_aligned(scale_row_bytes(hidden) * slots);
  std::int64_t const row_bytes = fp8_row_bytes(intermediate);
  std::int64_t const scale_bytes = scale_row_bytes(intermediate);
  result.gathered_scale = first + gathered_bytes;
  // By the row alone, so that more tokens never need fewer bytes.
  result.in_place = apart || row_bytes + scale_bytes > 2 * hidden + 8;
  if (result.in_place) {
    std::int64_t const second = std::max(gathered_end, first + hidden_bytes);
    result.intermediate = second;
    result.quantised = second;
    result.quantised_row_bytes = 2 * intermediate;
    result.quantised_scale = second + row_bytes;
    result.quantised_scale_row_bytes = 2 * intermediate;
    result.rows = first;
    result.total = second + middle_bytes;
  } else {
    result.quantised = first;
    result.quantised_row_bytes = row_bytes;
    result.quantised_scale = first + workspace_aligned(row_bytes * slots);
    result.quantised_scale_row_bytes = scale_bytes;
    result.rows = result.quantised_scale + workspace_aligned(scale_bytes * slots);
    result.intermediate = std::max(gathered_end, result.rows);
    result.total = std::max(result.intermediate + middle_bytes, result.rows + hidden_bytes);
  }
  return result;
}

/// Bytes that serve any dtype, wherever the workspace begins: what a caller's own has to have.
constexpr std::int64_t workspace_bytes(std::int64_t slots,
                                       std::int64_t hidden,
                                       std::int64_t intermediate,
                                       std::int64_t num_experts) {
  return kWorkspaceAlignment +
         std::max(workspace_layout(slots, hidden, intermediate, num_experts, false).total,
                  workspace_layout(slots, hidden, intermediate, num_experts, true).total);
}

}  // namespace moe_ext::fused_moe
