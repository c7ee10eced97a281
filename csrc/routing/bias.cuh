// Biased scores in place of logits, for the choice alone.
#pragma once

#include <algorithm>

#include "routing/logits.cuh"
#include "routing/scores.cuh"
#include "routing/shared_keys.cuh"

namespace moe_ext::routing {

/// A lane's biases of up to 8 x 32 neighbouring experts, 32 apart so that a warp loads whole lines. With more experts
/// the next ones are loaded when these are used up.
template <int kValues>
struct Biases {
  static constexpr int kCount = std::min(kValues, 8);

  float values[kCount];

  __device__ void load(Params const& params, int first_expert) {
    with_type(params.bias_type, params.bias, [&](auto const* data) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        std::int64_t const expert = first_expert + i * kWarp;
        values[i] = expert < params.num_experts ? to_float(data[expert * params.bias_stride]) : 0.0f;
      }
    });
  }
};

/// Turns the keys of logits into those of biased scores. An expert that does not count stays so, and a sum that is not
/// a number does not count. `biases` are those from the lane's own number on.
template <int kValues>
__device__ void add_bias(Params const& params,
                         Softmax const& softmax,
                         Biases<kValues> biases,
                         SharedKeys shared) {
  constexpr int kCount = Biases<kValues>::kCount;
#pragma unroll 1
  for (int first = lane_idx(); first < params.num_experts; first += kCount * kWarp) {
    if (first >= kCount * kWarp) {
      biases.load(params, first);
    }
    with_scoring(params.scoring, [&]<Scoring kScoring>() {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        int const expert = first + i * kWarp;
        if (expert < params.num_experts) {
          float const logit = number_of(shared[expert]);
          float const biased = score_of<kScoring>(logit, softmax) + biases.values[i];
          bool const counts = logit > -INFINITY && biased == biased;
          shared[expert] = counts ? key_of(biased) : kLastKey;
        }
      }
    });
  }
}

}  // namespace moe_ext::routing
