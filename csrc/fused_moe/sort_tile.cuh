// A CTA's slots: each warp ranks a contiguous part of them, then the counts of the warps become places.
#pragma once

#include "fused_moe/sort_keys.cuh"

namespace moe_ext::fused_moe {

/// Dynamic shared memory of sort_shared_bytes(...).
struct TileStorage {
  std::uint16_t*
      counts;      // (warps, bins): a warp's slots in a bin, later the tile's slots of the bin before them
  int* totals;     // (bins,): the tile's slots
  int* all;        // (bins,): everybody's slots
  int* first_row;  // (bins,): everybody's before the tile, later the row of the tile's first

  __device__ TileStorage(void* shared, int bins) {
    totals = static_cast<int*>(shared);
    all = totals + bins;
    first_row = all + bins;
    counts = reinterpret_cast<std::uint16_t*>(first_row + bins);
  }
};

/// The first slot of this thread; the others follow 32 apart, in the part of its warp.
template <int kItems>
__device__ int first_slot_of_thread(int tile) {
  int const thread = static_cast<int>(threadIdx.x);
  int const warp_begin = (tile * static_cast<int>(blockDim.x) + thread / kWarp * kWarp) * kItems;
  return warp_begin + thread % kWarp;
}

/// A bin, and above it a rank: how many earlier slots of the warp have the same bin. In one register, because 1,024
/// threads have 64 each.
inline constexpr int kRankShift = 16;
static_assert(kMaxExperts < 1 << kRankShift && kMaxItems * kWarp <= 1 << kRankShift, "each has 16 bits");

__device__ inline int bin_in(int ranked) {
  return ranked & ((1 << kRankShift) - 1);
}

__device__ inline int rank_in(int ranked) {
  return ranked >> kRankShift;
}

/// The lanes whose bin is the same, by a vote for each of its bits; several slots at a time hide each other's latency.
template <int kSlots>
__device__ void find_peers(int const* bins, int bits, unsigned (&peers)[kSlots]) {
#pragma unroll
  for (unsigned& mask : peers) {
    mask = kAllLanes;
  }
  for (int bit = 0; bit < bits; ++bit) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      bool const one = bins[i] >> bit & 1;
      unsigned const ones = __ballot_sync(kAllLanes, one);
      peers[i] &= one ? ones : ~ones;
    }
  }
}

/// Adds to each bin its rank, 32 slots at a time in their order, with `counts` of the warp, which are zero.
template <int kItems>
__device__ void rank_in_warp(int (&slots)[kItems], int bits, std::uint16_t* counts) {
  constexpr int kSlots = kItems < 4 ? kItems : 4;
  unsigned const lanes_before = (1u << threadIdx.x % kWarp) - 1;
#pragma unroll
  for (int first = 0; first < kItems; first += kSlots) {
    unsigned peers[kSlots];
    find_peers(slots + first, bits, peers);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      std::uint16_t& count = counts[slots[first + i]];
      int const earlier = count;
      unsigned const peers_before = peers[i] & lanes_before;
      slots[first + i] |= (earlier + __popc(peers_before)) << kRankShift;
      __syncwarp();  // all have read what the first of the peers now changes
      if (peers_before == 0) {
        count = static_cast<std::uint16_t>(earlier + __popc(peers[i]));
      }
      __syncwarp();
    }
  }
}

/// Calls `function(pair)` for the pairs of neighbouring bins of this thread, which are neighbours too and the same in
/// every step.
template <class Function>
__device__ void for_own_pairs(int bins, Function const& function) {
  int const threads = static_cast<int>(blockDim.x);
  int const pairs = bins / 2;
  int const each = (pairs + threads - 1) / threads;
  int const begin = min(static_cast<int>(threadIdx.x) * each, pairs);
  int const end = min(begin + each, pairs);
  for (int pair = begin; pair < end; ++pair) {
    function(pair);
  }
}

/// Turns the counts of the warps into sums of the warps before, and returns the totals of a pair of bins. A tile has at
/// most 8,192 slots, so two sums of 16 bits are one addition.
__device__ inline int2 sum_over_warps(std::uint16_t* counts, int bins, int pair) {
  constexpr int kBatch = 8;  // loads in flight
  int const warps = static_cast<int>(blockDim.x) / kWarp;
  int const step = bins / 2;
  unsigned* const column = reinterpret_cast<unsigned*>(counts) + pair;
  unsigned sum = 0;
  for (int first = 0; first < warps; first += kBatch) {
    unsigned values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      values[i] = first + i < warps ? column[(first + i) * step] : 0;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < warps) {
        column[(first + i) * step] = sum;
      }
      sum += values[i];
    }
  }
  return make_int2(static_cast<int>(sum & 0xffffu), static_cast<int>(sum >> 16));
}

/// Sum of `value` over all threads before this one.
__device__ inline int sum_before_thread(int value) {
  __shared__ int of_warps[kMaxSortThreads / kWarp];
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int const warp = static_cast<int>(threadIdx.x) / kWarp;
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    int const other = __shfl_up_sync(kAllLanes, sum, distance);
    sum += lane >= distance ? other : 0;
  }
  if (lane == kWarp - 1) {
    of_warps[warp] = sum;
  }
  __syncthreads();
  int const warps_before = __reduce_add_sync(kAllLanes, lane < warp ? of_warps[lane] : 0);
  return warps_before + sum - value;
}

/// Zeroes the counts of this warp; they are multiples of 16 bytes.
__device__ inline void clear_counts(std::uint16_t* counts, int bins) {
  auto* const words = reinterpret_cast<uint4*>(counts);
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < bins / 8; i += kWarp) {
    words[i] = {};
  }
  __syncwarp();
}

}  // namespace moe_ext::fused_moe
