// From ids to bins: the expert here, or the last bin for every id that has none.
#pragma once

#include "common/expert_ids.hpp"

namespace moe_ext {

inline constexpr int kLanes = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

/// Unsigned, so that no id overflows and what lies below `first` comes out too large.
__device__ inline int bin_of(std::int64_t id, std::int64_t first, int num_experts) {
  std::uint64_t const local = static_cast<std::uint64_t>(id) - static_cast<std::uint64_t>(first);
  return local < static_cast<std::uint64_t>(num_experts) ? static_cast<int>(local) : num_experts;
}

/// Bins of the slots `first_slot`, `first_slot` + 32 and so on; those past the last slot are in the last bin, behind
/// everything else there. Loads are issued before the first is used.
template <class Id, int kItems>
__device__ void load_bins_of(ExpertIds const& ids, int first_slot, int (&bins)[kItems]) {
  auto const* const topk_ids = static_cast<Id const*>(ids.topk_ids);
  Id values[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    int const slot = first_slot + i * kLanes;
    values[i] = Id{-1};
    if (slot < ids.num_slots) {
      int token, choice;
      ids.top_k(token, choice, slot);
      values[i] = topk_ids[token * ids.row_stride + choice];
    }
  }
  if (ids.expert_map == nullptr) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      bins[i] = bin_of(values[i], ids.first_expert, ids.num_experts);
    }
    return;
  }
  auto const num_global = static_cast<std::uint64_t>(ids.num_global);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    auto const id = static_cast<std::uint64_t>(std::int64_t{values[i]});
    bins[i] = id < num_global ? ids.expert_map[id] : -1;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    bins[i] = bin_of(bins[i], 0, ids.num_experts);
  }
}

template <int kItems>
__device__ void load_bins(ExpertIds const& ids, int first_slot, int (&bins)[kItems]) {
  // Not a branch for each item, at the end of which it would have to be there.
  if (ids.type == IdType::Int64) {
    load_bins_of<std::int64_t, kItems>(ids, first_slot, bins);
  } else {
    load_bins_of<std::int32_t, kItems>(ids, first_slot, bins);
  }
}

}  // namespace moe_ext
