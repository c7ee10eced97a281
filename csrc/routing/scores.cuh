// From logits to scores, as moe_ext.reference has them to a few units in the last place.
#pragma once

#include "routing/keys.cuh"
#include "routing/params.hpp"

namespace moe_ext::routing {

/// What a token's softmax over all experts is made of.
struct Softmax {
  float largest;
  float reciprocal_sum;
};

/// Of logits that a warp holds, with their keys. Where all are -infinity nobody may ask for a score.
template <int kValues>
__device__ Softmax softmax_of(float const (&logits)[kValues], unsigned const (&keys)[kValues]) {
  float const largest = number_of(__reduce_max_sync(kAllLanes, largest_of(keys)));
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    sum += expf(logits[i] - largest);
  }
  return {largest, 1.0f / sum_of_lanes(sum)};
}

/// PTX's own square root, within one unit: the exact one is a loop with a call in it.
__device__ inline float square_root(float value) {
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(value));
  return root;
}

/// The score of one expert whose logit is above -infinity.
template <Scoring kScoring>
__device__ float score_of(float logit, Softmax const& softmax) {
  if constexpr (kScoring == Scoring::Softmax) {
    return expf(logit - softmax.largest) * softmax.reciprocal_sum;
  } else if constexpr (kScoring == Scoring::Sigmoid) {
    return __fdividef(1.0f, 1.0f + expf(-logit));
  } else if constexpr (kScoring == Scoring::SqrtSoftplus) {
    // log1p keeps the digits where the exponential is small, the maximum keeps it from overflowing.
    return square_root(fmaxf(logit, 0.0f) + log1pf(expf(-fabsf(logit))));
  } else {
    return logit;
  }
}

/// Calls `function.template operator()<kScoring>()`.
template <class Function>
__device__ auto with_scoring(Scoring scoring, Function const& function) {
  switch (scoring) {
    case Scoring::Softmax:
      return function.template operator()<Scoring::Softmax>();
    case Scoring::SoftmaxTopk:
      return function.template operator()<Scoring::SoftmaxTopk>();
    case Scoring::Sigmoid:
      return function.template operator()<Scoring::Sigmoid>();
    default:
      return function.template operator()<Scoring::SqrtSoftplus>();
  }
}

}  // namespace moe_ext::routing
