// Accumulators to memory: scale, round, turn in shared memory where tokens sit on N, store by TMA or 16 bytes a thread.
#pragma once

#include <cuda_bf16.h>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/arch/barrier.h>

#include "grouped_gemm/sm90/epilogue_params.cuh"
#include "grouped_gemm/sm90/mainloop.cuh"
#include "grouped_gemm/sm90/named_barriers.cuh"

namespace moe_ext::grouped_gemm {

template <class ConfigTag>
struct Epilogue {
  using T = Traits<ConfigTag>;
  static constexpr int kChunk = 64;  // tokens x weights turned at a time: 128-byte rows of bf16
  static constexpr int kChunksN = (T::kMaxTileN + kChunk - 1) / kChunk;
  static_assert(T::kMaxTileN % kChunk == 0 || T::kMaxTileN == 16 || T::kMaxTileN == 32,
                "accumulator columns are turned over in whole chunks or in one");

  static constexpr int kStagedTokens = T::kSwapped && T::kMaxTileN < kChunk ? T::kMaxTileN : kChunk;
  static constexpr int kChunks = T::kBlocksM * kChunksN;  // of one warp group
  static constexpr int kChunkBytes = kStagedTokens * kChunk * 2;
  /// As many chunks as fit beside the ring are turned over at a time: fewer barriers and fences a tile
  /// (docs/notes/epilogue.md). Co-resident CTAs hide one another's epilogue and need the room for stages.
  static constexpr int kFit = (227 * 1024 - 1024 - static_cast<int>(sizeof(Ring<ConfigTag>))) /
                              (T::kConfig.mma_warp_groups * kChunkBytes);
  static constexpr int kBuffers =
      T::kConfig.ctas_per_sm > 1 || kFit < 2 || kChunks < 2 ? 1 : (kFit < kChunks ? 2 : kChunks);
  static_assert(kChunks % kBuffers == 0, "chunks are turned over in equal batches");
  static constexpr bool kWholeChunks = kStagedTokens == kChunk;

  /// Per warp group and buffer: (kStagedTokens, kChunk weights) bf16, 16-byte pieces swizzled by the token's
  /// low bits: TMA's 128-byte swizzle, under which neither stmatrix nor 16-byte reads meet a bank conflict.
  struct SharedStorage {
    alignas(1024) unsigned char staging[T::kConfig.mma_warp_groups][kBuffers][kChunkBytes];
  };

  EpilogueParams const& params;
  CUtensorMap const& out_map;
  SharedStorage& storage;
  int warp_group;
  int thread;  // within the warp group

  /// Stores the tile's rows below `token_end` and weights below n, times their rows' factors.
  __device__ void store(Accumulators<ConfigTag> const& acc,
                        Tile const& tile,
                        RowFactors<ConfigTag> const& rows) {
    if (params.out_dtype == OutDtype::BF16) {
      store_bf16(acc, tile, rows);
    } else {
      store_fp32(acc, tile, rows);
    }
  }

  /// Shares `kShare` values of each thread of the warp group through its staging buffer, before results are turned over
  /// in it: value i of thread t is at t + 128 * i.
  template <int kShare>
  __device__ float const* share(float const (&values)[kShare]) const {
    static_assert(kBuffers * kChunkBytes >= kShare * 128 * static_cast<int>(sizeof(float)),
                  "a warp group's staging holds its threads' values");
    auto* const table = reinterpret_cast<float*>(storage.staging[warp_group]);
    wait_for_stores();
    barrier();
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      table[thread + 128 * i] = values[i];
    }
    barrier();
    return table;
  }

  /// Waits until shared memory may go and every store is done.
  __device__ void finish() const {
    if (kWholeChunks && thread == 0) {
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
  }

 private:
  /// Where a chunk of the accumulators goes.
  struct Place {
    int token;
    int weight;
    bool wanted;
  };

  static constexpr int kChunkValues = (T::kMaxTileN < kChunk ? T::kMaxTileN : kChunk) / 2;  // a thread's
  using ChunkValues = float const (&)[kChunkValues];

  __device__ static ChunkValues chunk_of(Accumulators<ConfigTag> const& acc, int chunk) {
    return reinterpret_cast<ChunkValues>(acc.value[chunk / kChunksN][chunk % kChunksN * kChunk / 2]);
  }

  __device__ Place place(Tile const& tile, int chunk) const {
    int const column = chunk % kChunksN * kChunk;
    int const row_m = (warp_group * T::kBlocksM + chunk / kChunksN) * T::kBlockM;
    int const token = tile.token_begin + (T::kSwapped ? column : row_m);
    int const weight = tile.weight_tile * T::kConfig.tile_weights + (T::kSwapped ? row_m : column);
    int const used_n = T::kSwapped ? tile.token_width : T::kConfig.tile_weights;
    return {token, weight, column < used_n && token < tile.token_end && weight < params.n};
  }

  __device__ void store_bf16(Accumulators<ConfigTag> const& acc,
                             Tile const& tile,
                             RowFactors<ConfigTag> const& rows) {
    unsigned char (*staging)[kChunkBytes] = storage.staging[warp_group];
#pragma unroll
    for (int first = 0; first < kChunks; first += kBuffers) {
      wait_for_stores();
      barrier();  // everybody has read what the buffers held, TMA included
#pragma unroll
      for (int i = 0; i < kBuffers; ++i) {
        int const chunk = first + i;
        Place const to = place(tile, chunk);
        if (to.wanted) {
          stage(chunk_of(acc, chunk), staging[i], to.token, tile.token_end, rows.value[chunk / kChunksN]);
        }
      }
      if (kWholeChunks) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      }
      barrier();
#pragma unroll
      for (int i = 0; i < kBuffers; ++i) {
        Place const to = place(tile, first + i);
        if (to.wanted) {
          // A chunk whose rows are all wanted leaves by TMA, which also cuts it off at n.
          if (kWholeChunks && to.token + kChunk <= tile.token_end) {
            if (thread == 0) {
              cute::SM90_TMA_STORE_2D::copy(&out_map, staging[i], to.weight, to.token);
            }
          } else {
            copy_rows(staging[i], to.token, tile.token_end, to.weight);
          }
        }
      }
      if (kWholeChunks && thread == 0) {
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
    }
  }

  /// Scales, rounds and turns one chunk into `staging`. `factors`: of the thread's first row and of its second.
  __device__ void stage(
      ChunkValues values, unsigned char* staging, int token, int token_end, float const (&factors)[2]) {
    int const warp = thread / 32;
    int const lane = thread % 32;
    int const matrix = lane / 8;  // which of stmatrix's four 8x8 blocks this lane addresses
#pragma unroll
    for (int j = 0; j < kChunkValues / 4; j += 2) {  // two 8-column blocks at a time
      if (T::kSwapped && token + 8 * j >= token_end) {
        break;
      }
      float const* v = values + 4 * j;
      unsigned const r0 = pack(v[0] * factors[0], v[1] * factors[0]);
      unsigned const r1 = pack(v[2] * factors[1], v[3] * factors[1]);
      unsigned const r2 = pack(v[4] * factors[0], v[5] * factors[0]);
      unsigned const r3 = pack(v[6] * factors[1], v[7] * factors[1]);
      int const m_row = warp * 16 + (matrix % 2) * 8;  // of the 64-row block
      int const n_row = (j + matrix / 2) * 8;          // of the 64-column chunk
      int const token_row = (T::kSwapped ? n_row : m_row) + lane % 8;
      int const piece = (T::kSwapped ? m_row : n_row) / 8;
      auto& row = *reinterpret_cast<cute::uint128_t*>(staging + staging_offset(token_row, piece));
      if constexpr (T::kSwapped) {
        cute::SM90_U16x8_STSM_T::copy(r0, r1, r2, r3, row);
      } else {
        cute::SM90_U32x4_STSM_N::copy(r0, r1, r2, r3, row);
      }
    }
  }

  /// Rows below `token_end` of a staged chunk, 16 bytes a thread.
  __device__ void copy_rows(unsigned char const* staging, int token, int token_end, int weight) const {
    constexpr int kPieces = kChunk / 8;
    constexpr int kRowsAtOnce = 128 / kPieces;
    int const piece = thread % kPieces;
    int row = thread / kPieces;
    auto* out =
        static_cast<__nv_bfloat16*>(params.out) + (token + row) * params.out_row_stride + weight + piece * 8;
    if (weight + piece * 8 < params.n) {
#pragma unroll
      for (int i = 0; i < kStagedTokens / kRowsAtOnce; ++i) {
        if (token + row < token_end) {
          *reinterpret_cast<uint4*>(out) =
              *reinterpret_cast<uint4 const*>(staging + staging_offset(row, piece));
        }
        row += kRowsAtOnce;
        out += kRowsAtOnce * params.out_row_stride;
      }
    }
  }

  __device__ void store_fp32(Accumulators<ConfigTag> const& acc,
                             Tile const& tile,
                             RowFactors<ConfigTag> const& rows) const {
    auto* out = static_cast<float*>(params.out);
    int const m = accumulator_row(thread);
    int const n = accumulator_column(thread);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      Place const to = place(tile, chunk);
      if (to.wanted) {
        auto const& values = chunk_of(acc, chunk);
#pragma unroll
        for (int i = 0; i < kChunkValues; ++i) {
          int const row_m = m + (i % 4 / 2) * 8;
          int const row_n = n + i / 4 * 8 + i % 2;
          int const token = to.token + (T::kSwapped ? row_n : row_m);
          int const weight = to.weight + (T::kSwapped ? row_m : row_n);
          if (token < tile.token_end && weight < params.n) {
            out[token * params.out_row_stride + weight] = values[i] * rows.value[chunk / kChunksN][i % 4 / 2];
          }
        }
      }
    }
  }

  /// Lets thread 0 wait until TMA has read what its stores were given.
  __device__ void wait_for_stores() const {
    if (kWholeChunks && thread == 0) {
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
  }

  __device__ void barrier() const {
    cutlass::arch::NamedBarrier::sync(128, static_cast<unsigned>(NamedBarrier::kStaging) + warp_group);
  }

  __device__ static int staging_offset(int token_row, int piece) {
    return token_row * kChunk * 2 + ((piece ^ (token_row % 8)) * 16);
  }

  __device__ static unsigned pack(float low, float high) {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<unsigned const&>(pair);
  }
};

}  // namespace moe_ext::grouped_gemm
