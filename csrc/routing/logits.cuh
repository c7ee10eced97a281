// Loads of a token's logits and of the bias, as floats.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "routing/keys.cuh"
#include "routing/params.hpp"

namespace moe_ext::routing {

/// How a lane reaches its logits: vectors, where rows are made of whole aligned ones, or one after the other.
enum class Access { Vector, Element };

__device__ inline float to_float(float value) {
  return value;
}
__device__ inline float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ inline float to_float(__half value) {
  return __half2float(value);
}

/// NaN counts as -infinity, +infinity as the largest float: what follows meets neither NaN nor inf - inf.
__device__ inline float tame(float logit) {
  return logit == logit ? fminf(logit, FLT_MAX) : -INFINITY;
}

/// Values of a vector of at most 16 bytes.
template <class T, int kValues>
inline constexpr int kVectorElems = kValues * sizeof(T) <= 16 ? kValues : 16 / static_cast<int>(sizeof(T));

template <class T, int kElems>
struct alignas(sizeof(T) * kElems) Vector {
  T values[kElems];
};

// Plain loads, no __ldg: a previous kernel may have written the logits while this one was already running, and the
// read-only path would not have to see it.

/// `left` logits from `first` on, at most all of `logits`; those past them are -infinity and not touched.
template <class T, int kValues>
__device__ void load(T const* first, int left, Access access, float (&logits)[kValues]) {
  constexpr int kElems = kVectorElems<T, kValues>;
  if (access == Access::Vector) {
#pragma unroll
    for (int i = 0; i < kValues; i += kElems) {
      Vector<T, kElems> vector{};
      if (i < left) {
        vector = *reinterpret_cast<Vector<T, kElems> const*>(first + i);
      }
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        logits[i + j] = i < left ? tame(to_float(vector.values[j])) : -INFINITY;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      logits[i] = i < left ? tame(to_float(first[i])) : -INFINITY;
    }
  }
}

/// Calls `function` with the pointer in its type.
template <class Function>
__device__ auto with_type(InputType type, void const* data, Function const& function) {
  switch (type) {
    case InputType::BF16:
      return function(static_cast<__nv_bfloat16 const*>(data));
    case InputType::FP16:
      return function(static_cast<__half const*>(data));
    default:
      return function(static_cast<float const*>(data));
  }
}

/// The logits of a token from `expert` on.
template <int kValues>
__device__ void load_logits(
    Params const& params, std::int64_t token, int expert, Access access, float (&logits)[kValues]) {
  std::int64_t const offset = token * params.logits_row_stride + expert;
  with_type(params.logits_type, params.logits, [&](auto const* data) {
    load(data + offset, params.num_experts - expert, access, logits);
  });
}

__device__ inline float load_logit(Params const& params, std::int64_t token, int expert) {
  std::int64_t const offset = token * params.logits_row_stride + expert;
  return tame(
      with_type(params.logits_type, params.logits, [&](auto const* data) { return to_float(data[offset]); }));
}

}  // namespace moe_ext::routing
