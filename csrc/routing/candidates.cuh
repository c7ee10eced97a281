// Experts that a warp takes one after the other, the best first. Lane i holds the kValues neighbouring experts from
// i * kValues on, so the lowest lane of several with the same key has the lowest expert.
#pragma once

#include <type_traits>

#include "routing/shared_keys.cuh"

namespace moe_ext::routing {

struct Candidate {
  unsigned key;
  int expert;
};

__device__ inline int first_lane(bool condition) {
  return __ffs(static_cast<int>(__ballot_sync(kAllLanes, condition))) - 1;
}

/// Keys in registers: each lane looks through all of its own in every round. Best for few.
template <int kValues>
class RegisterCandidates {
 public:
  __device__ RegisterCandidates(unsigned const (&keys)[kValues], SharedKeys) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      keys_[i] = keys[i];
    }
  }

  __device__ Candidate take() {
    unsigned const own = largest_of(keys_);
    unsigned const best = __reduce_max_sync(kAllLanes, own);
    int const at = first_of(own, keys_);
    int const winner = first_lane(own == best);
    bool const won = lane_idx() == winner;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      keys_[i] = won && at == i ? kNoKey : keys_[i];
    }
    return {best, winner * kValues + __shfl_sync(kAllLanes, at, winner)};
  }

 private:
  unsigned keys_[kValues];
};

/// Keys in shared memory, each lane's largest in a register: after every round the whole warp looks through those of
/// the lane that had the best one, so that a round costs the same whatever kValues is.
template <int kValues>
class SharedCandidates {
 public:
  __device__ SharedCandidates(unsigned const (&keys)[kValues], SharedKeys shared)
      : shared_(shared), largest_(largest_of(keys)) {
    __syncwarp();  // whoever read these words before has done so
    shared_.store(keys);
  }

  __device__ Candidate take() {
    unsigned const best = __reduce_max_sync(kAllLanes, largest_);
    int const winner = first_lane(largest_ == best);
    int const part = lane_idx() * kPart;  // of the winner's keys
    unsigned keys[kPart];
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      keys[i] = part < kValues ? shared_[winner * kValues + part + i] : kNoKey;
    }
    int const holder = first_lane(largest_of(keys) == best);
    int const at = first_of(best, keys);
    if (lane_idx() == holder) {
      shared_[winner * kValues + part + at] = kNoKey;
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        keys[i] = at == i ? kNoKey : keys[i];
      }
    }
    unsigned const rest = __reduce_max_sync(kAllLanes, largest_of(keys));
    largest_ = lane_idx() == winner ? rest : largest_;
    __syncwarp();  // the next round reads what this one has written
    return {best, winner * kValues + __shfl_sync(kAllLanes, part + at, holder)};
  }

 private:
  static constexpr int kPart = kValues > kWarp ? kValues / kWarp : 1;

  SharedKeys shared_;
  unsigned largest_;
};

/// A round in registers costs about 5 instructions a value, one in shared memory about 25 and its latency.
template <int kValues>
using Candidates = std::conditional_t<kValues <= 8, RegisterCandidates<kValues>, SharedCandidates<kValues>>;

}  // namespace moe_ext::routing
