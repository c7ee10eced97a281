// Slots (token, choice) sorted by expert, from routing's ids: what comes before a grouped GEMM. No torch.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "grouped_gemm/tiling.hpp"

namespace moe_ext::fused_moe {

enum class IdType { Int32, Int64 };

inline constexpr int kMaxExperts = 4096;
inline constexpr int kMaxTopK = 32;
/// Slots that the device counts in 32 bits, with room for what a last CTA counts past the end.
inline constexpr std::int64_t kMaxSlots = (std::int64_t{1} << 31) - 1 - (1 << 16);

/// Strides are in elements. Slot t * top_k + j is choice j of token t. Ids without an expert here are dropped: they get
/// no row, and are never an index.
struct SortParams {
  void const* topk_ids;  // (num_tokens, top_k), contiguous along top_k
  IdType id_type;
  std::int64_t ids_row_stride;
  int const* expert_map;      // (num_global,), the expert here of each id, or anything else; null for no map
  std::int64_t num_global;    // 0 without a map
  std::int64_t first_expert;  // without a map: the id of expert 0, at least 0
  int const* places = nullptr;  // (num_experts,), each expert's place in the order of rows; null: its number
  std::int64_t num_tokens;
  int top_k;
  int num_experts;      // 1 to kMaxExperts
  int* offs;            // (num_experts,), end row of each place
  int* row_slot;        // (num_tokens * top_k,), -1 from row offs[num_experts - 1] on
  bool tokens_of_rows;  // row_slot takes t in place of t * top_k + j
  int* slot_row;        // (num_tokens * top_k,), -1 where dropped
  int* scratch;         // sort_scratch_elems(...) of them, null where that is 0
  /// Not null, of up to kMaxFewSlots slots: as many pieces of rows by place, and then none.
  grouped_gemm::ListedRows* listed = nullptr;
  bool programmatic;  // may begin before the previous kernel has ended, for which it then waits
};

/// How much scratch so many slots take, 0 where one launch does.
std::int64_t sort_scratch_elems(std::int64_t num_slots, int num_experts);

/// Stable: the rows of a place are in the order of their slots. One launch for up to 65,536 slots (32,768 from about
/// 3,000 experts on), three beyond. The result does not depend on timing.
void sort_tokens(SortParams const& params, cudaStream_t stream);

}  // namespace moe_ext::fused_moe
