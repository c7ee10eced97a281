// What a choice of experts needs to know, without torch.
#pragma once

#include <cstdint>

#include "common/input_type.hpp"

namespace moe_ext::routing {

/// How logits become scores; the numbers are those of the op's argument.
enum class Scoring : std::int64_t { Softmax = 0, SoftmaxTopk = 1, Sigmoid = 2, SqrtSoftplus = 3 };

inline constexpr int kMaxExperts = 2048;
inline constexpr int kMaxTopK = 32;    // one lane of a warp for each
inline constexpr int kMaxGroups = 32;  // one bit of a word for each

/// Strides are in elements, 0 in dimensions of one.
struct Params {
  void const* logits;  // (num_tokens, num_experts), experts contiguous
  void const* bias;    // (num_experts,), added to scores for the choice alone, or null
  float* weights;      // (num_tokens, top_k), contiguous along top_k
  int* ids;            // (num_tokens, top_k), contiguous along top_k
  InputType logits_type;
  InputType bias_type;
  Scoring scoring;
  bool renormalize;
  float scale;
  int num_tokens;
  int num_experts;
  int top_k;
  int num_groups;   // of equal size, neighbouring experts
  int topk_groups;  // whose experts may be chosen
  std::int64_t logits_row_stride;
  std::int64_t bias_stride;
  std::int64_t weights_row_stride;
  std::int64_t ids_row_stride;
};

}  // namespace moe_ext::routing
