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

}  // namespace moe_ext::quantize
