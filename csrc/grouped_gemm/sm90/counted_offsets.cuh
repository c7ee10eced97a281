// The groups' end rows from the ids of the slots, by one warp: sooner than from a kernel that sorts them.
#pragma once

#include "common/expert_ids.cuh"
#include "grouped_gemm/sm90/traits.cuh"

namespace moe_ext::grouped_gemm {

/// Shared memory of a kernel that counts.
template <class ConfigTag>
struct CountedOffsets {
  struct Nothing {};
  struct Table {
    int ends[kMostCountedGroups];
  };
  using SharedStorage = std::conditional_t<counts_ids(Traits<ConfigTag>::kConfig), Table, Nothing>;
};

/// Leaves in `ends` what a stable sort of `ids` has as offsets. By all lanes of one warp.
__device__ inline void count_ends(ExpertIds const& ids, int* ends) {
  constexpr int kItems = 8;  // ids of a lane on the way at a time
  int const lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int i = lane; i < ids.num_experts; i += kLanes) {
    ends[i] = 0;
  }
  __syncwarp();
  for (int first = 0; first < ids.num_slots; first += kItems * kLanes) {
    int bins[kItems];
    load_bins(ids, first + lane, bins);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (bins[i] < ids.num_experts) {
        atomicAdd(&ends[bins[i]], 1);
      }
    }
  }
  __syncwarp();
  int before = 0;
  for (int first = 0; first < ids.num_experts; first += kLanes) {
    bool const exists = first + lane < ids.num_experts;
    int end = exists ? ends[first + lane] : 0;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      int const below = __shfl_up_sync(kAllLanes, end, distance);
      end += lane >= distance ? below : 0;
    }
    end += before;
    if (exists) {
      ends[first + lane] = end;
    }
    before = __shfl_sync(kAllLanes, end, kLanes - 1);
  }
  __syncwarp();
}

}  // namespace moe_ext::grouped_gemm
