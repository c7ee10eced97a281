// What joins a gate value and an up value.
#pragma once

#include "grouped_gemm/params.hpp"

namespace moe_ext::grouped_gemm {

/// By the fast exponential and reciprocal: relative error below 2^-20, far below the rounding to bf16 that follows.
__device__ inline float sigmoid(float x) {
  return __fdividef(1.f, 1.f + __expf(-x));
}

/// The smaller one, NaN if either is: what is not a number must not become the limit.
__device__ inline float min_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ inline float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ inline float join(Gating const& gating, float gate, float up) {
  float const g = min_nan(gate, gating.gate_limit);
  float const u = min_nan(max_nan(up, -gating.up_limit), gating.up_limit);
  float const square = fminf(g * g, 36.f);
  float const slope = gating.linear + square * (gating.cubic + square * gating.quintic);
  return g * sigmoid(g * slope) * (u + gating.up_offset);
}

}  // namespace moe_ext::grouped_gemm
