// Scales and quotients, bit for bit those of moe_ext.reference.
#pragma once

#include <cfloat>
#include <cstdint>

#include <cuda_fp8.h>

namespace moe_ext::quantize {

inline constexpr float kFp8Max = 448.0f;

/// The scale that takes `largest` to the end of FP8's range: never zero, subnormal or infinite. An infinity counts
/// as the largest float. Not decreasing in `largest` above zero.
__device__ inline float scale_of(float largest, bool power_of_two) {
  float const finite = fminf(largest, FLT_MAX);
  float const scale = finite > 0.0f ? fmaxf(__fdiv_rn(finite, kFp8Max), FLT_MIN) : 1.0f;
  if (!power_of_two) {
    return scale;
  }
  // Up to the next power of two: a mantissa other than zero carries into the exponent.
  return __uint_as_float((__float_as_uint(scale) + 0x007fffffu) & 0x7f800000u);
}

/// min and max of PTX that keep a NaN, which fminf and fmaxf drop.
__device__ inline float clamp_keeping_nan(float value, float limit) {
  float result;
  asm("{\n"
      ".reg .f32 low;\n"
      "max.NaN.f32 low, %1, %2;\n"
      "min.NaN.f32 %0, low, %3;\n"
      "}"
      : "=f"(result)
      : "f"(value), "f"(-limit), "f"(limit));
  return result;
}

/// Divides by one scale many times, in four operations and as `/` would: what the multiplication by a rounded
/// reciprocal leaves over is exact in a fused multiply-add and corrects the quotient (checked against `/` for all
/// mantissas of scales and bfloat16 values). Both operands are first lifted by the power of two that takes the scale
/// to [1, 2): so nothing that could reach an FP8 value underflows.
class Divisor {
 public:
  /// `scale` is positive, normal and below 2^127; `reciprocal` is what reciprocal_of gives for it.
  __device__ Divisor(float scale, float reciprocal) {
    lift_ = __uint_as_float(0x7f000000u - (__float_as_uint(scale) & 0x7f800000u));
    scale_ = mantissa(scale);
    reciprocal_ = reciprocal;
  }

  __device__ explicit Divisor(float scale) : Divisor(scale, reciprocal_of(scale)) {}

  __device__ static float reciprocal_of(float scale) {
    return __frcp_rn(mantissa(scale));
  }

  /// What `divide` takes.
  __device__ float lift(float value) const {
    return value * lift_;
  }

  /// Brings lifted values that are too large to divide, such as infinities, near the end of FP8's range.
  __device__ static float limit(float lifted) {
    return clamp_keeping_nan(lifted, 4096.0f);
  }

  __device__ float divide(float lifted) const {
    float const quotient = lifted * reciprocal_;
    // Its negative, so that a quotient of -0 stays one.
    float const remainder = fmaf(quotient, scale_, -lifted);
    return fmaf(remainder, -reciprocal_, quotient);
  }

  /// Whether the scale is large enough for an infinity to be among its values.
  __device__ bool may_meet_infinity() const {
    return lift_ < 0x1p-118f;
  }

 private:
  __device__ static float mantissa(float scale) {
    return __uint_as_float((__float_as_uint(scale) & 0x007fffffu) | 0x3f800000u);
  }

  float lift_;
  float scale_;
  float reciprocal_;
};

/// Two quotients rounded to nearest even, beyond 448 to 448; NaN becomes 0x7f. `first` is the lower byte.
__device__ inline unsigned to_fp8x2(float first, float second) {
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
}

}  // namespace moe_ext::quantize
