// Scales that do not change along K: read when a tile begins, multiplied in before its results are rounded.
#pragma once

#include "grouped_gemm/params.hpp"
#include "grouped_gemm/sm90/traits.cuh"

namespace moe_ext::grouped_gemm {

/// The scales of one thread's part of a tile. The tokens' and the weights' are one each for the whole tile, or rows
/// or channels have their own (`vary`): then `m` are those of the thread's rows on WGMMA's M side, `n` the thread's
/// share of the N side's.
///
/// They are only loaded here, and multiplied after the main loop: a product now would wait for memory in every tile.
template <class ConfigTag>
struct OutputScales {
  using T = Traits<ConfigTag>;
  static constexpr int kShare = (T::kMaxTileN + 127) / 128;  // columns n, n + 128 of the tile are thread n's

  float tokens = 1.f;
  float weights = 1.f;
  bool vary = false;
  float m[T::kBlocksM][2];
  float n[kShare];

  /// Called behind the tile's first full stage: a previous kernel may have written the scales.
  __device__ OutputScales(TokenScales const& a,
                          WeightScales const& b,
                          Tile const& tile,
                          int num_weights,
                          int warp_group,
                          int thread) {
    if constexpr (T::kConfig.dtype == Dtype::BF16) {
      return;
    }
    auto const weight_scale = [&](int weight) {
      return b.data == nullptr || weight >= num_weights
                 ? 1.f
                 : b.data[tile.group * b.group_stride + weight * b.n_stride];
    };
    auto const token_scale = [&](int token) {
      return a.data == nullptr || token >= tile.token_end
                 ? 1.f
                 : a.data[tile.group * a.group_shift + token * a.row_stride];
    };
    int const weight_begin = tile.weight_tile * T::kConfig.tile_weights;
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
        m[block_m][half] =
            T::kSwapped ? weight_scale(weight_begin + row) : token_scale(tile.token_begin + row);
      }
    }
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      int const column = thread + 128 * i;
      n[i] = T::kSwapped ? token_scale(tile.token_begin + column) : weight_scale(weight_begin + column);
    }
  }
};

}  // namespace moe_ext::grouped_gemm
