// Which kernels sort how many slots, with how many threads: host arithmetic alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/math.hpp"

namespace moe_ext::fused_moe {

inline constexpr int kWarp = 32;
inline constexpr int kMaxSortThreads = 1024;
inline constexpr int kSortClusterCtas = 8;  // the most that any GPU of the architecture promises to place
inline constexpr int kMaxFewSlots = 128;  // by then every warp reads all ids, which costs more than barriers
inline constexpr int kFewThreads = 128;
// Beyond, ranking in one SM costs more than meeting in a cluster: layers of 2,048 slots 1 to 2 us, of 1,024 1 us
// (docs/notes/layer-stages.md).
inline constexpr int kMaxCtaSlots = 512;
inline constexpr int kMaxItems = 8;  // of a thread: with 16 its registers spill
inline constexpr int kMaxSharedBytes = 227 * 1024;

/// Few: warps that need nobody else. Cta, Cluster: one launch. Grid: counts, their sums, and then the rows.
enum class SortWay { Few, Cta, Cluster, Grid };

struct SortPlan {
  SortWay way;
  int items;    // slots of a thread: 1, 2, 4 or 8
  int threads;  // of a CTA
  int tiles;    // CTAs that share the slots
};

/// An expert each, and a last bin for dropped slots; rounded up to 16 bytes of counts.
inline int sort_bins(int num_experts) {
  return static_cast<int>(ceil_div(num_experts + 1, 8)) * 8;
}

/// A count of 16 bits for each warp and bin, three numbers of 32 bits for each bin.
inline int sort_shared_bytes(int threads, int num_experts) {
  return sort_bins(num_experts) * (threads / kWarp * 2 + 3 * 4);
}

/// As few as hold `slots` with `items` each.
inline int sort_threads(std::int64_t slots, int items) {
  return static_cast<int>(ceil_div(slots, std::int64_t{items} * kWarp)) * kWarp;
}

inline SortPlan plan_sort(std::int64_t slots, int num_experts) {
  if (slots <= kMaxFewSlots) {
    int const items = slots <= kWarp ? 1 : kMaxFewSlots / kWarp;
    int const expert_ctas = static_cast<int>(ceil_div(num_experts, kFewThreads));
    return {SortWay::Few, items, kFewThreads, expert_ctas + 1};
  }
  // Each warp has counts of its own: with thousands of experts shared memory holds those of half as many.
  constexpr int kReserved = 1024;
  bool const all_fit = sort_shared_bytes(kMaxSortThreads, num_experts) <= kMaxSharedBytes - kReserved;
  int const most = all_fit ? kMaxSortThreads : kMaxSortThreads / 2;
  if (slots <= kMaxCtaSlots) {
    return {SortWay::Cta, 1, sort_threads(slots, 1), 1};
  }
  for (int items = 1; items <= kMaxItems; items *= 2) {
    if (slots <= std::int64_t{items} * most * kSortClusterCtas) {
      std::int64_t const each = ceil_div(slots, kSortClusterCtas);
      return {SortWay::Cluster, items, sort_threads(each, items), kSortClusterCtas};
    }
  }
  // Enough CTAs for all SMs first, then as few counts in global memory as registers allow.
  constexpr std::int64_t kMany = 1 << 19;
  int const items = slots <= kMany ? 4 : kMaxItems;
  return {SortWay::Grid, items, most, static_cast<int>(ceil_div(slots, std::int64_t{items} * most))};
}

}  // namespace moe_ext::fused_moe
