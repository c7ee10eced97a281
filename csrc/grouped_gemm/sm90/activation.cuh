// What joins a gate value and an up value.
#pragma once

#include "grouped_gemm/params.hpp"

namespace moe_ext::grouped_gemm {

/// By the fast power of two and reciprocal: relative error below 2^-20, far below the rounding to bf16 that follows.
/// What they flush to zero would be lost beside 1, or is below 2^-126 itself.
__device__ inline float sigmoid(float x) {
  constexpr float kMinusLog2E = -1.44269504f;
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * kMinusLog2E));
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.f + power));
  return result;
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

struct Join {
  Gating const& gating;

  __device__ float operator()(float gate, float up) const {
    float const g = min_nan(gate, gating.gate_limit);
    float const u = min_nan(max_nan(up, -gating.up_limit), gating.up_limit);
    float const square = fminf(g * g, 36.f);
    float const slope = gating.linear + square * (gating.cubic + square * gating.quintic);
    return g * sigmoid(g * slope) * (u + gating.up_offset);
  }
};

/// The same bits in half the instructions where gating is_swiglu.
struct JoinSwiglu {
  Gating const& gating;

  __device__ float operator()(float gate, float up) const {
    return gate * sigmoid(gate) * (up + gating.up_offset);
  }
};

}  // namespace moe_ext::grouped_gemm
