// Two mma warp groups kept out of step, so that one multiplies while the other promotes or stores.
#pragma once

#include <cutlass/arch/barrier.h>

#include "grouped_gemm/sm90/named_barriers.cuh"

namespace moe_ext::grouped_gemm {

/// In step, both warp groups of a tile would leave the tensor cores idle at the same times: during promotion
/// and during the epilogue. The second one therefore begins a tile when the first is kLead stages into it.
class Stagger {
 public:
  /// `active`: the tile has more stages than the ring. Otherwise the first warp group could arrive for a
  /// second tile before the second warp group has begun the first one.
  __device__ Stagger(bool active, int warp_group) : active_(active), warp_group_(warp_group) {}

  /// Called by a warp group before its first stage of a tile.
  __device__ void begin() const {
    if (active_ && warp_group_ == 1) {
      cutlass::arch::NamedBarrier::sync(256, static_cast<unsigned>(NamedBarrier::kStagger));
    }
  }

  /// Called after stage `k_tile` of a tile.
  __device__ void passed(int k_tile) const {
    if (active_ && warp_group_ == 0 && k_tile == kLead - 1) {
      cutlass::arch::NamedBarrier::arrive(256, static_cast<unsigned>(NamedBarrier::kStagger));
    }
  }

 private:
  static constexpr int kLead = 2;

  bool active_;
  int warp_group_;
};

}  // namespace moe_ext::grouped_gemm
