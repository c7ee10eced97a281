// The ring of shared-memory stages between the load warp and the mma warp groups.
#pragma once

#include <cutlass/arch/barrier.h>

#include "grouped_gemm/sm90/traits.cuh"

namespace moe_ext::grouped_gemm {

/// Position in the ring: which stage, the parity of its barriers on this lap, and where the step's scales lie.
template <int kStages>
struct RingState {
  int stage = 0;
  unsigned phase = 0;
  int scale_slot = 0;  // of kStages + 1

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
    scale_slot = scale_slot == kStages ? 0 : scale_slot + 1;
  }
};

/// What stage `s` holds besides operands: the consumers learn their work from it.
struct StageInfo {
  Tile tile;
  int k_tile;
};

/// full[s]: 1 arrival (the CTA's own load warp) plus the bytes of both operands, with block scales also one arrival
/// per lane of the scale warp; where tokens are gathered their bytes are not counted, and each lane of the warps that
/// gather arrives. Waited on by the mma warps.
/// told[s]: 1 arrival, the load warp's, once info[s] says what the stage is for; waited on by the warps that gather.
/// empty[s]: one arrival per mma warp, once it has multiplied; waited on by the load warp and the scale warp.
///
/// Scales are read after that, when sums are promoted, so they have one slot more than there are stages: the next step
/// to use a stage puts its scales where those of the step before this one were, which every warp has used by then.
template <class ConfigTag>
struct Ring {
  using T = Traits<ConfigTag>;
  static constexpr Config kConfig = T::kConfig;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kWeightsBytes = kConfig.tile_weights * kAtomBytes;  // of one atom of K
  static constexpr int kTokensBytes = kConfig.tile_tokens * kAtomBytes;
  static constexpr int kFullArrivals = 1 + (T::kScalesInRing ? 32 : 0);
  static constexpr int kGatherArrivals = 32 * kGatherWarps;
  static constexpr int kEmptyArrivals = T::kMmaThreads / 32;

  alignas(1024) unsigned char weights[kStages][T::kAtomsK][kWeightsBytes];  // (tile_weights, 128 B) swizzled
  alignas(1024) unsigned char tokens[kStages][T::kAtomsK][kTokensBytes];    // (token_width, 128 B) swizzled
  alignas(16) StageInfo info[kStages];
  struct Nothing {};
  // Scale blocks along n that a tile may touch: those of an aligned tile, one more at either end and where the
  // second segment begins. Gated: those of gate, then those of up, which lie every second row at the widest.
  static constexpr int kHalfBlocks = kConfig.tile_weights / kScaleBlock + 2;
  static constexpr int kWeightBlocks = T::kGated ? 2 * kHalfBlocks : kConfig.tile_weights / kScaleBlock + 3;
  template <int kCount>
  using Scales = std::conditional_t<T::kScalesInRing, float[kStages + 1][T::kAtomsK][kCount], Nothing>;
  alignas(8) [[no_unique_address]] Scales<kConfig.tile_tokens> token_scales;
  [[no_unique_address]] Scales<T::kPartsK * kWeightBlocks> weight_scales;
  /// Of the tile whose first step the stage is, where tokens are gathered: read behind its full barrier.
  using RowScales = std::conditional_t<T::kGathersScales, float[kStages][kConfig.tile_tokens], Nothing>;
  [[no_unique_address]] RowScales row_scales;
  cutlass::arch::ClusterTransactionBarrier full[kStages];
  cutlass::arch::ClusterBarrier empty[kStages];
  // Not [[no_unique_address]] at the end: what follows a ring would lie in its padding, out of line.
  cutlass::arch::ClusterBarrier told[T::kGathers ? kStages : 1];

  __device__ void init(bool gathers) {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(kFullArrivals + (gathers ? kGatherArrivals : 0));
      empty[stage].init(kEmptyArrivals);
      if (gathers) {
        told[stage].init(1);
      }
    }
  }

  /// Called by all lanes of an mma warp once its WGMMAs have read the stage.
  __device__ void release(int stage) {
    if (threadIdx.x % 32 == 0) {
      empty[stage].arrive();
    }
  }
};

}  // namespace moe_ext::grouped_gemm
