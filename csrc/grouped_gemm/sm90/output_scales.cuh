// Scales that do not change along K: read when a tile begins, multiplied in before its results are rounded.
#pragma once

#include "grouped_gemm/params.hpp"
#include "grouped_gemm/sm90/epilogue_of.cuh"
#include "grouped_gemm/sm90/token_rows.cuh"
#include "grouped_gemm/sm90/weight_rows.cuh"

namespace moe_ext::grouped_gemm {

/// The scales of one thread's part of a tile. The tokens' and the weights' are one each for the whole tile, or rows
/// or channels have their own (`vary`): then `rows` are those of the thread's rows on WGMMA's M side, `n` the
/// thread's share of the N side's: columns s, s + kSharers, ... are sharer s's.
///
/// They are only loaded here, and multiplied after the main loop: a product now would wait for memory in every tile.
template <class ConfigTag>
struct OutputScales {
  using T = Traits<ConfigTag>;
  /// Who holds the N side together: a warp, which needs no barrier, where that takes few registers of a thread.
  static constexpr int kSharers = T::kMaxTileN <= 128 ? 32 : 128;
  static constexpr int kShare = (T::kMaxTileN + kSharers - 1) / kSharers;

  float tokens = 1.f;
  float weights = 1.f;
  bool vary = false;
  RowFactors<ConfigTag> rows;
  float n[kShare];

  /// Called behind the tile's first full stage: a previous kernel may have written the scales. `gathered` are those of
  /// the tile's tokens, where they came with it; null where `a` has them.
  __device__ OutputScales(TokenScales const& a,
                          float const* gathered,
                          WeightScales const& b,
                          Tile const& tile,
                          WeightRows<ConfigTag> const& weight_rows,
                          int warp_group,
                          int thread) {
    if constexpr (T::kConfig.dtype == Dtype::BF16) {
      return;
    }
    auto const weight_scale = [&](int weight) {
      return b.data == nullptr || weight >= weight_rows.n
                 ? 1.f
                 : b.data[tile.group * b.group_stride + weight * b.n_stride];
    };
    auto const token_scale = [&](int row) {
      if constexpr (T::kGathersScales) {
        if (gathered != nullptr) {
          return row < tile.token_end ? gathered[row - tile.token_begin] : 1.f;
        }
      }
      return a.data == nullptr || row >= tile.token_end
                 ? 1.f
                 : a.data[tile.group * a.group_shift + token_of_row<ConfigTag>(a, row) * a.row_stride];
    };
    int const lane_row = accumulator_row(thread);
    vary = a.row_stride != 0 || a.group_shift != 0 || b.n_stride != 0;
    if (!vary) {
      // All lanes read the same (both strides are 0), through addresses that look different: the compiler would
      // wait for a value it knows to be the same, in order to move it to a uniform register.
      tokens = a.data == nullptr ? 1.f : a.data[lane_row * a.row_stride];
      weights = b.data == nullptr ? 1.f : b.data[tile.group * b.group_stride + lane_row * b.n_stride];
      return;
    }
#pragma unroll
    for (int block_m = 0; block_m < T::kBlocksM; ++block_m) {
      int const row_m = (warp_group * T::kBlocksM + block_m) * T::kBlockM + lane_row;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const row = row_m + 8 * half;
        rows.value[block_m][half] =
            T::kSwapped ? weight_scale(weight_rows(row)) : token_scale(tile.token_begin + row);
      }
    }
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      int const column = thread % kSharers + kSharers * i;
      n[i] = T::kSwapped ? token_scale(tile.token_begin + column) : weight_scale(weight_rows(column));
    }
  }

  /// Multiplies the sums by the scales that differ and returns the factors left for their rows, which rounding applies
  /// on its way. With a wide N side none are left: there ptxas would put sums and partial sums into the same register
  /// banks (plain promoted order, mixtral gate/up at T = 8192: 1322 in place of 1350 TFLOP/s).
  __device__ RowFactors<ConfigTag> apply(Accumulators<ConfigTag>& acc,
                                         EpilogueOf<ConfigTag> const& epilogue) const {
    auto const one = RowFactors<ConfigTag>::all(1.f);
    if (!vary) {
      return RowFactors<ConfigTag>::all(tokens * weights);
    }
    int const first = accumulator_column(epilogue.thread);
    if constexpr (kSharers == 32) {
      multiply(acc, one, [&](int column) {
        int const lane = column % 32 + first;
        return float2{__shfl_sync(kFullWarp, n[column / 32], lane),
                      __shfl_sync(kFullWarp, n[column / 32], lane + 1)};
      });
      return rows;
    } else {
      float const* const table = epilogue.share(n) + first;
      multiply(acc, rows, [&](int column) { return *reinterpret_cast<float2 const*>(table + column); });
      return one;
    }
  }

 private:
  /// `columns(column)`: the scales of the thread's two columns from `column`, a multiple of 8, on.
  template <class Columns>
  __device__ static void multiply(Accumulators<ConfigTag>& acc,
                                  RowFactors<ConfigTag> const& row_factors,
                                  Columns const& columns) {
#pragma unroll
    for (int column = 0; column < T::kMaxTileN; column += 8) {
      float2 const scale = columns(column);
#pragma unroll
      for (int block_m = 0; block_m < T::kBlocksM; ++block_m) {
        float const(&row)[2] = row_factors.value[block_m];
        float* const values = acc.value[block_m] + column / 2;
        values[0] *= row[0] * scale.x;
        values[1] *= row[0] * scale.y;
        values[2] *= row[1] * scale.x;
        values[3] *= row[1] * scale.y;
      }
    }
  }
};

}  // namespace moe_ext::grouped_gemm
