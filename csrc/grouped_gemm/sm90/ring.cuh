// The ring of shared-memory stages between the load warp and the mma warp groups.
#pragma once

#include <cutlass/arch/barrier.h>

#include "grouped_gemm/sm90/traits.cuh"

namespace moe_ext::grouped_gemm {

/// Position in the ring: which stage, and the parity of its barriers on this lap.
template <int kStages>
struct RingState {
  int stage = 0;
  unsigned phase = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

/// What stage `s` holds besides operands: the consumers learn their work from it.
struct StageInfo {
  Tile tile;
  int k_tile;
};

/// full[s]: 1 arrival (the CTA's own load warp) plus the bytes of both operands; waited on by the mma warps.
/// empty[s]: one arrival per mma warp of every CTA that shares the token tile, because each of those
/// writes this CTA's stage by multicast; waited on by the load warp.
template <class ConfigTag>
struct Ring {
  using T = Traits<ConfigTag>;
  static constexpr Config kConfig = T::kConfig;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kWeightsBytes = kConfig.tile_weights * kAtomBytes;  // of one atom of K
  static constexpr int kTokensBytes = kConfig.tile_tokens * kAtomBytes;
  static constexpr int kEmptyArrivals = T::kMmaThreads / 32 * kConfig.multicast;

  alignas(1024) unsigned char weights[kStages][T::kAtomsK][kWeightsBytes];  // (tile_weights, 128 B) swizzled
  alignas(1024) unsigned char tokens[kStages][T::kAtomsK][kTokensBytes];    // (token_width, 128 B) swizzled
  alignas(16) StageInfo info[kStages];
  cutlass::arch::ClusterTransactionBarrier full[kStages];
  cutlass::arch::ClusterBarrier empty[kStages];

  __device__ void init() {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(1);
      empty[stage].init(kEmptyArrivals);
    }
  }

  /// Called by all lanes of an mma warp once its WGMMAs have read the stage.
  __device__ void release(int stage) {
    int const lane = threadIdx.x % 32;
    if constexpr (kConfig.multicast == 1) {
      if (lane == 0) {
        empty[stage].arrive();
      }
    } else {
      if (lane < kConfig.multicast) {
        empty[stage].arrive(static_cast<unsigned>(lane));
      }
    }
  }
};

}  // namespace moe_ext::grouped_gemm
