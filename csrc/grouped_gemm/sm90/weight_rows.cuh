// Which row of b[group] each row of a tile of weights is.
#pragma once

#include "grouped_gemm/params.hpp"
#include "grouped_gemm/sm90/traits.cuh"

namespace moe_ext::grouped_gemm {

/// Output columns of a tile.
template <class ConfigTag>
inline constexpr int kTileFeatures =
    Traits<ConfigTag>::kConfig.tile_weights / (Traits<ConfigTag>::kGated ? 2 : 1);

/// Rows of a tile that lies `weight_tile` tiles from the first. Gated tiles hold 8 gate rows, the 8 up rows of the same
/// features, 8 more gate rows and so on, which leaves both of a feature with one thread: rows r and r + 8 of WGMMA's M
/// side, columns c and c + 8 of its N side.
template <class ConfigTag>
struct WeightRows {
  using T = Traits<ConfigTag>;

  int first;  // row, gated: feature
  int n;      // rows of b[group]
  Gating const& gating;

  __device__ WeightRows(int weight_tile, int n_, Gating const& gating_)
      : first(weight_tile * kTileFeatures<ConfigTag>), n(n_), gating(gating_) {}

  /// Row of b[group], n or more past its end.
  __device__ int operator()(int row) const {
    if constexpr (!T::kGated) {
      return first + row;
    } else {
      int const feature = first + row / 16 * 8 + row % 8;
      return feature < n / 2 ? of_feature(feature, row / 8 % 2) : n;
    }
  }

  /// The last one that exists, past the end.
  __device__ int clamped(int row) const {
    if constexpr (!T::kGated) {
      return min(first + row, n - 1);
    } else {
      return of_feature(min(first + row / 16 * 8 + row % 8, n / 2 - 1), row / 8 % 2);
    }
  }

  /// Gated: the gate row (half 0) or the up row (half 1) of a feature.
  __device__ int of_feature(int feature, int half) const {
    return feature / 8 * gating.slab_step + feature % 8 * gating.feature_step + half * gating.up_step;
  }
};

}  // namespace moe_ext::grouped_gemm
