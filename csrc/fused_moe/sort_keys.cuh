// From ids to bins: the place of the expert here, or the last bin for every id that has none.
#pragma once

#include <cstdint>

#include "fused_moe/sort_kernel_params.hpp"

namespace moe_ext::fused_moe {

inline constexpr unsigned kAllLanes = 0xffffffffu;

/// Unsigned, so that no id overflows and what lies below `first` comes out too large.
__device__ inline int bin_of(std::int64_t id, std::int64_t first, int num_experts) {
  std::uint64_t const local = static_cast<std::uint64_t>(id) - static_cast<std::uint64_t>(first);
  return local < static_cast<std::uint64_t>(num_experts) ? static_cast<int>(local) : num_experts;
}

/// Bins of the slots `first_slot`, `first_slot` + 32 and so on; those past the last slot are in the last bin, behind
/// everything else there. Loads are issued before the first is used.
template <class Id, int kItems>
__device__ void load_bins_of(SortKernelParams const& params, int first_slot, int (&bins)[kItems]) {
  SortParams const& problem = params.problem;
  auto const* const topk_ids = static_cast<Id const*>(problem.topk_ids);
  Id ids[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    int const slot = first_slot + i * kWarp;
    ids[i] = Id{-1};
    if (slot < params.num_slots) {
      int token, choice;
      params.choices_of_token(token, choice, slot);
      ids[i] = topk_ids[token * problem.ids_row_stride + choice];
    }
  }
  if (problem.expert_map == nullptr) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      bins[i] = bin_of(ids[i], problem.first_expert, problem.num_experts);
    }
    return;
  }
  auto const num_global = static_cast<std::uint64_t>(problem.num_global);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    auto const id = static_cast<std::uint64_t>(std::int64_t{ids[i]});
    bins[i] = id < num_global ? problem.expert_map[id] : -1;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    bins[i] = bin_of(bins[i], 0, problem.num_experts);
  }
}

template <int kItems>
__device__ void load_bins(SortKernelParams const& params, int first_slot, int (&bins)[kItems]) {
  SortParams const& problem = params.problem;
  // Not a branch for each item, at the end of which it would have to be there.
  if (problem.id_type == IdType::Int64) {
    load_bins_of<std::int64_t, kItems>(params, first_slot, bins);
  } else {
    load_bins_of<std::int32_t, kItems>(params, first_slot, bins);
  }
  if (problem.places == nullptr) {
    return;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    bins[i] = bins[i] < problem.num_experts ? problem.places[bins[i]] : -1;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    bins[i] = bin_of(bins[i], 0, problem.num_experts);
  }
}

/// A slot's row, and the other way around. Rows of dropped slots come behind all others, so that they fill up
/// `row_slot`.
__device__ inline void store_row(SortKernelParams const& params, int slot, int bin, int row) {
  if (slot < params.num_slots) {
    bool const here = bin < params.problem.num_experts;
    params.problem.slot_row[slot] = here ? row : -1;
    int source = slot;
    if (params.problem.tokens_of_rows) {
      int choice;
      params.choices_of_token(source, choice, slot);
    }
    params.problem.row_slot[row] = here ? source : -1;
  }
}

}  // namespace moe_ext::fused_moe
