// Group-limited routing: only experts of the best groups may be taken.
#pragma once

#include "routing/params.hpp"
#include "routing/shared_keys.cuh"

namespace moe_ext::routing {

/// Lanes that look through a group together: a power of two, at most kWarp / num_groups.
inline int lanes_per_group(int num_groups) {
  int lanes = kWarp;
  while (lanes * num_groups > kWarp) {
    lanes /= 2;
  }
  return lanes;
}

/// The two largest keys of a group.
struct BestTwo {
  unsigned first = kNoKey;
  unsigned second = kNoKey;

  __device__ void add(BestTwo const& other) {
    second = max(min(first, other.first), max(second, other.second));
    first = max(first, other.first);
  }
};

/// The best key, or with a bias the sum of the best two. Beside an expert that counts, one that does not is the lowest
/// float, so that a group with any expert that counts is better than a group with none.
__device__ inline unsigned group_key(BestTwo const& best, bool biased) {
  if (!biased || best.second == kNoKey) {
    return best.first;
  }
  return key_of(number_of(best.first) + fmaxf(number_of(best.second), -FLT_MAX));
}

/// Takes away the keys of all groups but the best `topk_groups`; among equals the lowest ones are better.
__device__ inline void drop_groups(Params const& params, int lanes, SharedKeys shared) {
  int const group_size = params.num_experts / params.num_groups;
  int const group = lane_idx() / lanes;
  // Lanes beyond the last group have nothing to do below.
  int const end = group < params.num_groups ? (group + 1) * group_size : 0;
  int const begin = group * group_size + lane_idx() % lanes;
  __syncwarp();
  BestTwo best;
  for (int expert = begin; expert < end; expert += lanes) {
    best.add({shared[expert], kNoKey});
  }
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    best.add({__shfl_xor_sync(kAllLanes, best.first, distance),
              __shfl_xor_sync(kAllLanes, best.second, distance)});
  }
  unsigned const key = group_key(best, params.bias != nullptr);
  int rank = 0;
  for (int other = 0; other < params.num_groups; ++other) {
    unsigned const other_key = __shfl_sync(kAllLanes, key, other * lanes);
    rank += other_key > key || (other_key == key && other < group) ? 1 : 0;
  }
  if (rank >= params.topk_groups) {
    for (int expert = begin; expert < end; expert += lanes) {
      shared[expert] = kNoKey;
    }
  }
}

}  // namespace moe_ext::routing
