// A warp's keys in shared memory: where lanes reach experts that other lanes hold.
#pragma once

#include "routing/keys.cuh"

namespace moe_ext::routing {

/// So placed that lanes that walk along their own experts, along neighbouring ones or along groups of a power of two
/// hardly meet in a bank.
struct SharedKeys {
  unsigned* words;

  static constexpr int size(int experts) {
    return experts + experts / kWarp;
  }

  __device__ unsigned& operator[](int expert) const {
    return words[expert + expert / kWarp];
  }

  /// Lane i's are those of the experts from i * kValues on. The warp meets after it.
  template <int kValues>
  __device__ void store(unsigned const (&keys)[kValues]) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      (*this)[lane_idx() * kValues + i] = keys[i];
    }
    __syncwarp();
  }

  /// The warp meets before it.
  template <int kValues>
  __device__ void load(unsigned (&keys)[kValues]) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      keys[i] = (*this)[lane_idx() * kValues + i];
    }
  }
};

}  // namespace moe_ext::routing
