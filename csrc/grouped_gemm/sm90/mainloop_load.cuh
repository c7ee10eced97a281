// Operands in, by TMA: what the load warp does of the main loop.
#pragma once

#include <cuda.h>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "grouped_gemm/sm90/ring.cuh"
#include "grouped_gemm/sm90/token_rows.cuh"

namespace moe_ext::grouped_gemm {

/// TMA descriptors: one for all groups' weights (the group is a coordinate), one per token width, one for stores.
struct TensorMaps {
  /// (k, n, group), box (128 B, tile_weights, 1); whole rows: (row_bytes, ...). Gated: (k, 8 features, gate or up,
  /// n / 16, group), box (128 B, 8, 2, tile_weights / 16, 1), so that every 16 rows of a tile are 8 of gate, 8 of up.
  CUtensorMap weights;
  CUtensorMap tokens[kNumTokenWidths];  // (k, row), box (128 B, width); by index of token_width()
  CUtensorMap out;                      // (n, row), box (64, 64); described for bf16 results only
};

/// Loads of one stage. Called by one lane.
template <class ConfigTag>
struct MainloopLoad {
  using T = Traits<ConfigTag>;
  static constexpr Config kConfig = T::kConfig;

  // Cache hints of TMA loads.
  static constexpr auto kEvictNormal = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  static constexpr auto kEvictFirst = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);

  TensorMaps const& maps;
  Ring<ConfigTag>& ring;
  int first_k_tile;  // where this CTA's part of K begins
  int row_bytes;     // whole rows: of K in a box of weights, all of it up to a stage's
  GatheredTokens const& gathered;

  /// Announces the whole stage to its full barrier and starts the half that no previous kernel writes.
  __device__ void load_weights(int stage, StageInfo const& info, std::uint64_t hint) const {
    ring.info[stage] = info;  // visible to whoever waits for the full barrier: the arrival releases it
    tell(stage);
    int const weight_bytes =
        T::kWholeRows ? kConfig.tile_weights * row_bytes : Ring<ConfigTag>::kWeightsBytes * T::kAtomsK;
    int const token_bytes = gathers() ? 0 : info.tile.token_width * kAtomBytes * T::kAtomsK;
    ring.full[stage].arrive_and_expect_tx(weight_bytes + token_bytes);
#pragma unroll
    for (int atom = 0; atom < (T::kWholeRows ? 1 : T::kAtomsK); ++atom) {
      auto* const target = ring.weights[stage][atom];
      int const k = k_of(info, atom);
      Tile const& tile = info.tile;
      if constexpr (T::kGated) {
        int const slab = tile.weight_tile * (kConfig.tile_weights / 16);
        cute::SM90_TMA_LOAD_5D::copy(&maps.weights, barrier(stage), hint, target, k, 0, 0, slab, tile.group);
      } else {
        int const weight = tile.weight_tile * kConfig.tile_weights;
        cute::SM90_TMA_LOAD_3D::copy(&maps.weights, barrier(stage), hint, target, k, weight, tile.group);
      }
    }
  }

  /// Starts the token half, unless others bring it.
  __device__ void load_tokens(int stage, StageInfo const& info) const {
    if (gathers()) {
      return;
    }
    CUtensorMap const* map = &maps.tokens[token_width_index(info.tile.token_width)];
#pragma unroll
    for (int atom = 0; atom < T::kAtomsK; ++atom) {
      cute::SM90_TMA_LOAD_2D::copy(map,
                                   barrier(stage),
                                   kEvictNormal,
                                   ring.tokens[stage][atom],
                                   k_of(info, atom),
                                   info.tile.token_begin);
    }
  }

  /// Lets those begin who bring tokens another way: the stage is free, and they find in its info what it is for.
  __device__ void tell(int stage) const {
    if constexpr (T::kGathers) {
      if (gathers()) {
        ring.told[stage].arrive();
      }
    }
  }

 private:
  /// Read from the parameters where it is asked: registers are few here.
  __device__ bool gathers() const {
    return T::kGathers && gathered.of_row != nullptr;
  }

  __device__ int k_of(StageInfo const& info, int atom) const {
    return ((first_k_tile + info.k_tile) * T::kAtomsK + atom) * T::kAtomK;
  }

  __device__ std::uint64_t* barrier(int stage) const {
    return reinterpret_cast<std::uint64_t*>(&ring.full[stage]);
  }

  __device__ static int token_width_index(int width) {
    int index = 0;
#pragma unroll
    for (int i = 0; i < kNumTokenWidths; ++i) {
      index += token_width(i) < width ? 1 : 0;
    }
    return index;
  }
};

}  // namespace moe_ext::grouped_gemm
