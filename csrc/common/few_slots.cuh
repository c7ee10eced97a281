// Up to 32 slots for each register: every warp that asks holds the bins of all, and nobody waits for anybody.
#pragma once

#include "common/expert_ids.cuh"

namespace moe_ext {

/// The bins of up to kLanes * kItems slots, of which a warp answers questions by counting bits. All lanes call every
/// method together, each with a question of its own.
template <int kItems>
class FewSlots {
 public:
  __device__ explicit FewSlots(ExpertIds const& ids) : bits_(ids.bits) {
    load_bins(ids, static_cast<int>(threadIdx.x) % kLanes, bins_);
  }

  /// The bin of a slot below kLanes * kItems.
  __device__ int bin_at(int slot) const {
    int bin = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      int const own = __shfl_sync(kAllLanes, bins_[i], slot % kLanes);
      bin = slot / kLanes == i ? own : bin;
    }
    return bin;
  }

  /// How many slots a stable sort puts before slot `before` of `bin`: those in lower bins, and those in the same one
  /// that come earlier. For several bins at a time, which share the votes.
  template <int kBins>
  __device__ void count(int const (&bins)[kBins], int before, int (&counts)[kBins]) const {
#pragma unroll
    for (int& count : counts) {
      count = 0;
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      unsigned below[kBins];
      unsigned same[kBins];
#pragma unroll
      for (int j = 0; j < kBins; ++j) {
        below[j] = 0;
        same[j] = kAllLanes;
      }
      // From the highest bit on; a vote tells each lane one bit of all slots.
      for (int bit = bits_ - 1; bit >= 0; --bit) {
        unsigned const ones = __ballot_sync(kAllLanes, bins_[i] >> bit & 1);
#pragma unroll
        for (int j = 0; j < kBins; ++j) {
          bool const one = bins[j] >> bit & 1;
          below[j] |= one ? same[j] & ~ones : 0u;
          same[j] &= one ? ones : ~ones;
        }
      }
#pragma unroll
      for (int j = 0; j < kBins; ++j) {
        counts[j] += __popc(below[j] | (same[j] & slots_before(before - i * kLanes)));
      }
    }
  }

  /// Where the rows of `bin` end.
  __device__ int end_of(int bin) const {
    int const bins[] = {bin};
    int end[1];
    count(bins, kItems * kLanes, end);
    return end[0];
  }

  /// The row of slot `slot` of `bin`.
  __device__ int row_of(int slot, int bin) const {
    int const bins[] = {bin};
    int row[1];
    count(bins, slot, row);
    return row[0];
  }

 private:
  /// The bits of those among 32 slots that come before slot `index`, which may be none or all.
  __device__ static unsigned slots_before(int index) {
    return index <= 0 ? 0u : index >= kLanes ? kAllLanes : (1u << index) - 1;
  }

  int bins_[kItems];
  int bits_;
};

}  // namespace moe_ext
