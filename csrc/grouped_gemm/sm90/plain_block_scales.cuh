// Scales that change along K in plain order: from memory into the registers of the threads that use them.
#pragma once

#include "grouped_gemm/params.hpp"
#include "grouped_gemm/sm90/token_rows.cuh"
#include "grouped_gemm/sm90/weight_rows.cuh"

namespace moe_ext::grouped_gemm {

/// Promotion of one thread's partial sums in plain order: its rows' token scales and the tile's weight scales, read
/// into registers a step of K ahead.
template <class ConfigTag>
struct PlainBlockPromotion {
  using T = Traits<ConfigTag>;
  static constexpr int kRows = 2 * T::kBlocksM;
  /// Weight scale blocks of a tile: of its columns or, gated, of its gate columns and of its up columns.
  static constexpr int kColumns = T::kConfig.tile_weights / kScaleBlock;
  static_assert(T::kSwapped || T::kConfig.tile_weights % kScaleBlock == 0, "columns are whole scale blocks");
  static_assert(!T::kGated || T::kSwapped || kColumns == 2, "one block of gate, one of up");

  struct Step {
    float token[kRows];
    float weight[kColumns];
  };

  float const* token[kRows];
  float const* weight[kColumns];
  std::int64_t token_k_stride;
  std::int64_t weight_k_stride;
  int last_k_block;
  Step now;
  Step next;

  /// Called behind the tile's first full stage: a previous kernel may have written the scales.
  __device__ PlainBlockPromotion(TokenScales const& tokens,
                                 WeightScales const& weights,
                                 Tile const& tile,
                                 WeightRows<ConfigTag> const& weight_rows,
                                 int k_blocks,
                                 int warp_group,
                                 int thread)
      : token_k_stride(tokens.k_stride), weight_k_stride(weights.k_stride), last_k_block(k_blocks - 1) {
    if (tile.group < 0) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      int const row = (warp_group * T::kBlocksM + i / 2) * T::kBlockM + accumulator_row(thread) + i % 2 * 8;
      // Rows past the end are never stored: any scale will do.
      int const last = min(tile.token_begin + row, tile.token_end - 1);
      token[i] = tokens.data + tile.group * tokens.group_shift +
                 token_of_row<ConfigTag>(tokens, last) * tokens.row_stride;
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      int const first = weight_rows.clamped(T::kGated ? 8 * i : i * kScaleBlock);
      int const segment = first >= weights.segment_n ? 1 : 0;
      // The last term is 0: it makes the address look different in each lane. The compiler moves a value that it knows
      // to be the same in all of them to a uniform register, and waits for it to do so.
      weight[i] = weights.data + tile.group * weights.group_stride + segment * weights.segment_stride +
                  (first - segment * weights.segment_n) / kScaleBlock * weights.n_stride +
                  accumulator_row(thread) * weights.k_offset;
    }
    load(0);
  }

  /// Of the thread's two rows; gated, products of two scales would take too many registers this early.
  struct Factors {
    float first;
    float second;
  };

  /// What the sums of the thread's two rows are multiplied by. Called while they are still being made.
  template <int kValues>
  __device__ Factors prepare(int, int, int k_block, int block_m, int column) {
    if (block_m == 0 && column == 0) {
      now = next;
      load(min(k_block + 1, last_k_block));
    }
    float const first = now.token[2 * block_m];
    float const second = now.token[2 * block_m + 1];
    float const w = T::kGated ? 1.f : now.weight[column / kScaleBlock];
    return {first * w, second * w};
  }

  template <int kValues>
  __device__ void add(
      Factors const& factors, int, int, int, int, int, float const (&partial)[kValues], float* sums) const {
    if constexpr (T::kGated) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float const w = now.weight[half];
        float const first = factors.first * w;
        float const second = factors.second * w;
#pragma unroll
        for (int i = 4 * half; i < kValues; i += i % 4 < 3 ? 1 : 5) {
          sums[i] += partial[i] * (i % 4 < 2 ? first : second);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        sums[i] += partial[i] * (i % 4 < 2 ? factors.first : factors.second);
      }
    }
  }

 private:
  /// Where it stands: the compiler would move it to its use.
  __device__ static float read(float const* address) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(address));
    return value;
  }

  __device__ void load(int k_block) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      next.token[i] = read(token[i] + k_block * token_k_stride);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      next.weight[i] = read(weight[i] + k_block * weight_k_stride);
    }
  }
};

}  // namespace moe_ext::grouped_gemm
