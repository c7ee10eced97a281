// Numbers as unsigned words of the same order, which a warp reduces in one instruction.
#pragma once

#include <cfloat>
#include <cmath>

namespace moe_ext::routing {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline int lane_idx() {
  return static_cast<int>(threadIdx.x) % kWarp;
}

/// Below the key of any number: no expert, one of a group that is out, one that is taken.
inline constexpr unsigned kNoKey = 0;
/// The key of -infinity: an expert that is taken after all others, and weighs nothing.
inline constexpr unsigned kLastKey = 0x007fffffu;

/// `value` is not NaN. Both zeros have the same key.
__device__ inline unsigned key_of(float value) {
  unsigned const bits = __float_as_uint(value + 0.0f);
  return bits ^ ((bits & 0x80000000u) != 0 ? 0xffffffffu : 0x80000000u);
}

/// The number of any key but kNoKey.
__device__ inline float number_of(unsigned key) {
  return __uint_as_float(key ^ ((key & 0x80000000u) != 0 ? 0x80000000u : 0xffffffffu));
}

/// The largest of a lane's keys, as a tree: a chain would wait for each comparison.
template <int kValues>
__device__ unsigned largest_of(unsigned const (&keys)[kValues]) {
  if constexpr (kValues == 1) {
    return keys[0];
  } else {
    unsigned halves[kValues / 2];
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      halves[i] = max(keys[2 * i], keys[2 * i + 1]);
    }
    return largest_of(halves);
  }
}

/// Where the first of a lane's keys equals `key`, which one of them does.
template <int kValues>
__device__ int first_of(unsigned key, unsigned const (&keys)[kValues]) {
  int at = kValues - 1;
#pragma unroll
  for (int i = kValues - 2; i >= 0; --i) {
    at = keys[i] == key ? i : at;
  }
  return at;
}

/// The sum over a warp, the same bits in all lanes.
__device__ inline float sum_of_lanes(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

}  // namespace moe_ext::routing
