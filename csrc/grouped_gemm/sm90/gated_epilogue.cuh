// Gate and up sums to memory: scale, join by the activation, round, turn in shared memory, store 16 bytes a thread.
#pragma once

#include <cuda_bf16.h>
#include <cute/arch/copy_sm90.hpp>
#include <cutlass/arch/barrier.h>

#include "grouped_gemm/sm90/activation.cuh"
#include "grouped_gemm/sm90/epilogue_params.cuh"
#include "grouped_gemm/sm90/feature_quantizer.cuh"
#include "grouped_gemm/sm90/mainloop.cuh"
#include "grouped_gemm/sm90/named_barriers.cuh"
#include "grouped_gemm/sm90/weight_rows.cuh"

namespace moe_ext::grouped_gemm {

/// A thread's sums of a gate row and of the up row of the same feature are beside one another (WeightRows), so the
/// activation needs no exchange. What it makes of 64 x 64 sums are 32 features of 64 tokens.
template <class ConfigTag>
struct GatedEpilogue {
  using T = Traits<ConfigTag>;
  static constexpr int kChunk = 64;  // sums along either side that are joined at a time
  static constexpr int kChunksN = (T::kMaxTileN + kChunk - 1) / kChunk;
  static constexpr int kFeatures = kChunk / 2;  // of a chunk
  static constexpr int kRowBytes = kFeatures * 2;
  static constexpr int kStagedTokens = T::kSwapped && T::kMaxTileN < kChunk ? T::kMaxTileN : kChunk;
  static constexpr int kPieces = kRowBytes / 16;

  using Quantizer = FeatureQuantizer<ConfigTag>;
  static constexpr int kStagingBytes =
      Quantizer::kFits ? Quantizer::kStagingBytes : kStagedTokens * kRowBytes;

  struct SharedStorage {
    alignas(128) unsigned char staging[T::kConfig.mma_warp_groups][kStagingBytes];
  };

  EpilogueParams const& params;
  CUtensorMap const& out_map;  // not used: rows of a chunk are too short for TMA's 128-byte swizzle
  SharedStorage& storage;
  int warp_group;
  int thread;  // within the warp group

  /// Stores the features of the tile's rows below `token_end`, sums times their rows' factors joined.
  __device__ void store(Accumulators<ConfigTag> const& acc,
                        Tile const& tile,
                        RowFactors<ConfigTag> const& rows) {
    if constexpr (Quantizer::kFits) {
      if (params.quantised.values != nullptr) {
        store_quantised(acc, tile);
        return;
      }
    }
    // A tile of many tokens is stored while the tensor core waits; kernels of few are kept short, as they are fetched
    // for each launch.
    if constexpr (!is_narrow(T::kConfig)) {
      if (is_swiglu(params.gating)) {
        store_by(JoinSwiglu{params.gating}, acc, tile, rows);
        return;
      }
    }
    store_by(Join{params.gating}, acc, tile, rows);
  }

  /// As Epilogue::share.
  template <int kShare>
  __device__ float const* share(float const (&values)[kShare]) const {
    static_assert(sizeof(storage.staging[0]) >= kShare * 128 * sizeof(float),
                  "a warp group's staging holds its threads' values");
    auto* const table = reinterpret_cast<float*>(storage.staging[warp_group]);
    barrier();
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      table[thread + 128 * i] = values[i];
    }
    barrier();
    return table;
  }

  /// Nothing is left to wait for.
  __device__ void finish() const {}

 private:
  static constexpr int kChunkValues = (T::kMaxTileN < kChunk ? T::kMaxTileN : kChunk) / 2;  // a thread's
  using Values = float const (&)[kChunkValues];

  template <class JoinBy>
  __device__ void store_by(JoinBy const& join,
                           Accumulators<ConfigTag> const& acc,
                           Tile const& tile,
                           RowFactors<ConfigTag> const& rows) {
    unsigned char* const staging = storage.staging[warp_group];
#pragma unroll
    for (int block_m = 0; block_m < T::kBlocksM; ++block_m) {
#pragma unroll
      for (int chunk_n = 0; chunk_n < kChunksN; ++chunk_n) {
        int const row_m = (warp_group * T::kBlocksM + block_m) * T::kBlockM;
        int const column = chunk_n * kChunk;
        int const token = tile.token_begin + (T::kSwapped ? column : row_m);
        int const feature = tile.weight_tile * kTileFeatures<ConfigTag> + (T::kSwapped ? row_m : column) / 2;
        int const used_n = T::kSwapped ? tile.token_width : T::kConfig.tile_weights;
        if (column < used_n && token < tile.token_end && feature < params.n / 2) {  // the same in all threads
          barrier();  // everybody has read what the buffer held
          stage(join,
                reinterpret_cast<Values>(acc.value[block_m][column / 2]),
                staging,
                token,
                tile.token_end,
                rows.value[block_m]);
          barrier();
          copy_rows(staging, token, tile.token_end, feature);
        }
      }
    }
  }

  /// Joins, rounds and turns one chunk into `staging`. `factors`: of the thread's first row and of its second.
  template <class JoinBy>
  __device__ void stage(JoinBy const& join,
                        Values values,
                        unsigned char* staging,
                        int token,
                        int token_end,
                        float const (&factors)[2]) const {
    int const warp = thread / 32;
    int const lane = thread % 32;
    int const matrix = lane / 8 % 2;  // which of stmatrix's two 8 x 8 blocks this lane addresses
#pragma unroll
    for (int j = 0; j < kChunkValues / 4; j += 2) {  // two 8-column blocks at a time
      if (T::kSwapped && token + 8 * j >= token_end) {
        break;
      }
      float const* const v = values + 4 * j;
      unsigned r0;
      unsigned r1;
      int token_row;
      int piece;
      if constexpr (T::kSwapped) {
        // Two tokens' gate, their up; the same of the tokens 8 further.
        float const gate = factors[0];
        float const up = factors[1];
        r0 = pack(join(v[0] * gate, v[2] * up), join(v[1] * gate, v[3] * up));
        r1 = pack(join(v[4] * gate, v[6] * up), join(v[5] * gate, v[7] * up));
        token_row = (j + matrix) * 8 + lane % 8;
        piece = warp;
      } else {
        // Two features' gate of the first row, of the second; their up.
        r0 = pack(join(v[0] * factors[0], v[4] * factors[0]), join(v[1] * factors[0], v[5] * factors[0]));
        r1 = pack(join(v[2] * factors[1], v[6] * factors[1]), join(v[3] * factors[1], v[7] * factors[1]));
        token_row = warp * 16 + matrix * 8 + lane % 8;
        piece = j / 2;
      }
      auto& row = *reinterpret_cast<cute::uint128_t*>(staging + staging_offset(token_row, piece));
      if constexpr (T::kSwapped) {
        cute::SM90_U16x4_STSM_T::copy(r0, r1, row);
      } else {
        cute::SM90_U32x2_STSM_N::copy(r0, r1, row);
      }
    }
  }

  __device__ void store_quantised(Accumulators<ConfigTag> const& acc, Tile const& tile) const {
    Quantizer const quantizer{params, storage.staging[warp_group], thread};
#pragma unroll
    for (int block_m = 0; block_m < T::kBlocksM; ++block_m) {
      int const token = tile.token_begin + (warp_group * T::kBlocksM + block_m) * T::kBlockM;
      if (token < tile.token_end) {  // the same in all threads
        barrier();                   // everybody has read what the buffer held
        quantizer.stage(acc.value[block_m], token, tile.token_end, tile.weight_tile);
        barrier();
        quantizer.copy_rows(token, tile.token_end, tile.weight_tile);
      }
    }
  }

  /// Rows below `token_end` of a staged chunk, 16 bytes a thread, 8 of FP8.
  __device__ void copy_rows(unsigned char const* staging, int token, int token_end, int feature) const {
    if constexpr (quantises_by_one_scale(T::kConfig)) {
      if (params.quantised.values != nullptr) {
        quantise_rows(staging, token, token_end, feature);
        return;
      }
    }
    constexpr int kRowsAtOnce = 128 / kPieces;
    int const piece = thread % kPieces;
    int row = thread / kPieces;
    auto* out =
        static_cast<__nv_bfloat16*>(params.out) + (token + row) * params.out_row_stride + feature + piece * 8;
    if (feature + piece * 8 < params.n / 2) {
#pragma unroll
      for (int i = 0; i < (kStagedTokens + kRowsAtOnce - 1) / kRowsAtOnce; ++i) {
        if (row < kStagedTokens && token + row < token_end) {
          *reinterpret_cast<uint4*>(out) =
              *reinterpret_cast<uint4 const*>(staging + staging_offset(row, piece));
        }
        row += kRowsAtOnce;
        out += kRowsAtOnce * params.out_row_stride;
      }
    }
  }

  /// As quantising what copy_rows stores would.
  __device__ void quantise_rows(unsigned char const* staging, int token, int token_end, int feature) const {
    constexpr int kRowsAtOnce = 128 / kPieces;
    int const piece = thread % kPieces;
    quantize::Divisor const divisor(*params.quantised.static_scale);
    unsigned char* const out = params.quantised.values + feature + piece * 8;
    if (feature + piece * 8 < params.n / 2) {
#pragma unroll 1
      for (int row = thread / kPieces; row < kStagedTokens && token + row < token_end; row += kRowsAtOnce) {
        quantize::Vector<__nv_bfloat16> const vector{
            *reinterpret_cast<uint4 const*>(staging + staging_offset(row, piece))};
        auto const values = quantize::quantize<__nv_bfloat16, quantize::Values::Any>(vector, divisor);
        *reinterpret_cast<uint2*>(out + (token + row) * params.quantised.row_stride) = {values.words[0],
                                                                                        values.words[1]};
      }
    }
  }

  __device__ void barrier() const {
    cutlass::arch::NamedBarrier::sync(128, static_cast<unsigned>(NamedBarrier::kStaging) + warp_group);
  }

  /// Two rows of 64 bytes share a line of banks; their pieces are permuted by the line's number.
  __device__ static int staging_offset(int token_row, int piece) {
    return token_row * kRowBytes + (piece ^ (token_row / 2 % kPieces)) * 16;
  }

  __device__ static unsigned pack(float low, float high) {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<unsigned const&>(pair);
  }
};

}  // namespace moe_ext::grouped_gemm
