// Up to 128 slots: every warp holds all bins and answers 32 questions by counting bits.
#pragma once

#include "fused_moe/sort_keys.cuh"
#include "fused_moe/sort_list.cuh"

namespace moe_ext::fused_moe {

/// Which of the warp's 32 bins are below the asked one, and which are the same: bit `lane` of a mask.
struct Comparison {
  unsigned below = 0;
  unsigned same = kAllLanes;
};

/// Compares from the highest bit on; a vote tells each lane one bit of all bins.
template <int kItems>
__device__ void compare(int const (&bins)[kItems], int asked, int bits, Comparison (&result)[kItems]) {
  for (int bit = bits - 1; bit >= 0; --bit) {
    bool const asked_one = asked >> bit & 1;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      unsigned const ones = __ballot_sync(kAllLanes, bins[i] >> bit & 1);
      if (asked_one) {
        result[i].below |= result[i].same & ~ones;
      }
      result[i].same &= asked_one ? ones : ~ones;
    }
  }
}

/// The bits of those among 32 slots that come before slot `index`, which may be none or all.
__device__ inline unsigned slots_before(int index) {
  return index <= 0 ? 0u : index >= kWarp ? kAllLanes : (1u << index) - 1;
}

/// The work of CTA `cta` of `params.tiles`, by its first kFewThreads threads: one for each expert, which asks for its
/// end row; in the last CTA one for each slot.
template <int kItems>
__device__ void sort_few_slots(SortKernelParams const& params, int cta) {
  int const expert = cta * kFewThreads + static_cast<int>(threadIdx.x);
  int const slot = static_cast<int>(threadIdx.x);
  bool const asks_for_slots = cta == params.tiles - 1;
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  int bins[kItems];
  load_bins(params, static_cast<int>(threadIdx.x % kWarp), bins);
  int asked[1] = {expert};
  if (asks_for_slots) {
    load_bins(params, slot, asked);
  }
  Comparison comparisons[kItems];
  compare(bins, asked[0], params.bits, comparisons);
  int begin = 0;
  int end = 0;
  int row = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    auto const [below, same] = comparisons[i];
    end += __popc(below | same);
    begin += __popc(below);
    row += __popc(below | (same & slots_before(slot - i * kWarp)));
  }
  if (asks_for_slots) {
    store_row(params, slot, asked[0], row);
    if (params.problem.listed != nullptr) {
      list_rows(params, slot, {.place = asked[0], .row = row, .begin = begin, .end = end});
    }
  } else if (expert < params.problem.num_experts) {
    params.problem.offs[expert] = end;
  }
}

}  // namespace moe_ext::fused_moe
