// Rows cut into chunks of 512 columns, four vectors for each thread of a team: enough loads in flight, and one search
// for the place of all four.
#pragma once

#include <cutlass/fast_math.h>

#include "common/check.hpp"
#include "quantize/rows.cuh"

namespace moe_ext::quantize {

inline constexpr int kChunkThreads = 256;
inline constexpr int kChunkBlocks = 4;

template <class T>
struct Chunks {
  static constexpr int kTeam =
      kBlock / Vector<T>::kElems;                       // threads that share 128 columns: 16 or 32 of a warp
  static constexpr int kTeams = kChunkThreads / kTeam;  // chunks of a CTA at a time
};

/// A thread's vectors of one chunk of a row.
template <class T>
struct ChunkVectors {
  Vector<T> blocks[kChunkBlocks];
};

inline int chunks_per_row(int k) {
  return (k + kBlock * kChunkBlocks - 1) / (kBlock * kChunkBlocks);
}

/// The column of a thread's vector in the first block of chunk `chunk`.
template <class T>
__device__ int chunk_column(int chunk) {
  return chunk * kBlock * kChunkBlocks + static_cast<int>(threadIdx.x) % Chunks<T>::kTeam * Vector<T>::kElems;
}

/// All loads are issued before the first is used. `left` counts from `first` to the end of the row.
template <class T, Access kAccess>
__device__ ChunkVectors<T> load_chunk(T const* first, int left) {
  ChunkVectors<T> vectors;
#pragma unroll
  for (int i = 0; i < kChunkBlocks; ++i) {
    vectors.blocks[i] = load<T, kAccess>(first + i * kBlock, left - i * kBlock);
  }
  return vectors;
}

/// Which block of its chunk a thread finds the scale of.
template <class T>
__device__ int own_block() {
  return static_cast<int>(threadIdx.x) % Chunks<T>::kTeam / (Chunks<T>::kTeam / kChunkBlocks);
}

/// The largest over the team of one of four values, that of the thread's own block. Halves of the team first give each
/// other what they do not keep, so that five or six shuffles do, not sixteen or twenty.
template <class T>
__device__ float largest_of_own_block(float const (&largest)[kChunkBlocks]) {
  static_assert(kChunkBlocks == 4, "the exchange below is between halves, then quarters of the team");
  constexpr int kHalf = Chunks<T>::kTeam / 2;
  constexpr int kQuarter = kHalf / 2;
  constexpr unsigned kWarp = 0xffffffffu;
  bool const upper_half = threadIdx.x & kHalf;
  float const first = __shfl_xor_sync(kWarp, upper_half ? largest[0] : largest[2], kHalf);
  float const second = __shfl_xor_sync(kWarp, upper_half ? largest[1] : largest[3], kHalf);
  float const lower = fmaxf(upper_half ? largest[2] : largest[0], first);
  float const upper = fmaxf(upper_half ? largest[3] : largest[1], second);
  bool const upper_quarter = threadIdx.x & kQuarter;
  float const other = __shfl_xor_sync(kWarp, upper_quarter ? lower : upper, kQuarter);
  return largest_of_lanes<kQuarter>(fmaxf(upper_quarter ? upper : lower, other));
}

}  // namespace moe_ext::quantize
