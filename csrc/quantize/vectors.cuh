// 16 bytes of a row at a time: loaded, unpacked to floats, stored as FP8.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "quantize/arithmetic.cuh"

namespace moe_ext::quantize {

/// How a thread reaches its values: whole vectors, where all of them are aligned, or one element after the other.
enum class Access { Vector, Element };

/// 16 bytes of x as they came.
template <class T>
struct Vector {
  static constexpr int kElems = 16 / sizeof(T);
  uint4 words;
};

/// FP8 values of a vector.
template <class T>
struct Quantized {
  static constexpr int kWords = Vector<T>::kElems / 4;
  unsigned words[kWords];
};

__device__ inline unsigned bits_at(__nv_bfloat16 const* address) {
  return __bfloat16_as_ushort(*address);
}
__device__ inline unsigned bits_at(__half const* address) {
  return __half_as_ushort(*address);
}
__device__ inline unsigned bits_at(float const* address) {
  return __float_as_uint(*address);
}

/// The values from `first` on; those past the `left` that the row still has are zero and not touched.
template <class T, Access kAccess>
__device__ Vector<T> load(T const* first, int left) {
  constexpr int kElems = Vector<T>::kElems;
  if constexpr (kAccess == Access::Vector) {
    return {left > 0 ? __ldg(reinterpret_cast<uint4 const*>(first)) : uint4{}};
  } else {
    unsigned words[4] = {};
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      unsigned const bits = i < left ? bits_at(first + i) : 0u;
      constexpr int kPerWord = kElems / 4;
      words[i / kPerWord] |= bits << (i % kPerWord * 16);
    }
    return {{words[0], words[1], words[2], words[3]}};
  }
}

/// A word's one or two values.
template <class T>
__device__ void unpack_word(unsigned word, float* values) {
  if constexpr (sizeof(T) == 4) {
    values[0] = __uint_as_float(word);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  } else {
    values[0] = __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
    values[1] = __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
  }
}

template <class T>
__device__ void unpack(Vector<T> const& vector, float (&values)[Vector<T>::kElems]) {
  constexpr int kPerWord = Vector<T>::kElems / 4;
  unpack_word<T>(vector.words.x, values);
  unpack_word<T>(vector.words.y, values + kPerWord);
  unpack_word<T>(vector.words.z, values + 2 * kPerWord);
  unpack_word<T>(vector.words.w, values + 3 * kPerWord);
}

__device__ inline __nv_bfloat162 pair_of(unsigned word, __nv_bfloat16 const*) {
  __nv_bfloat162_raw const raw{static_cast<unsigned short>(word), static_cast<unsigned short>(word >> 16)};
  return raw;
}
__device__ inline __half2 pair_of(unsigned word, __half const*) {
  __half2_raw const raw{static_cast<unsigned short>(word), static_cast<unsigned short>(word >> 16)};
  return raw;
}

/// The largest magnitude; NaN does not count.
template <class T>
__device__ float largest_of(Vector<T> const& vector) {
  uint4 const& words = vector.words;
  if constexpr (sizeof(T) == 4) {
    float const first = fmaxf(fabsf(__uint_as_float(words.x)), fabsf(__uint_as_float(words.y)));
    float const second = fmaxf(fabsf(__uint_as_float(words.z)), fabsf(__uint_as_float(words.w)));
    return fmaxf(fmaxf(first, second), 0.0f);
  } else {
    // Two at a time, in x's own type: unpacked values would stay in registers until they are quantised.
    constexpr T const* kType = nullptr;
    auto const first = __hmax2(__habs2(pair_of(words.x, kType)), __habs2(pair_of(words.y, kType)));
    auto const second = __hmax2(__habs2(pair_of(words.z, kType)), __habs2(pair_of(words.w, kType)));
    auto const both = __hmax2(first, second);
    return fmaxf(fmaxf(static_cast<float>(both.x), static_cast<float>(both.y)), 0.0f);
  }
}

template <class T, int kVectors>
__device__ float largest_of(Vector<T> const (&vectors)[kVectors]) {
  float largest = 0.0f;
#pragma unroll
  for (Vector<T> const& vector : vectors) {
    largest = fmaxf(largest, largest_of(vector));
  }
  return largest;
}

/// Which quotients `quantize` has to expect.
enum class Values { OfTheScale, Any };

/// Quantises by the scale of values that this vector is among, or by any scale.
template <class T, Values kValues>
__device__ Quantized<T> quantize(Vector<T> const& vector, Divisor const& divisor) {
  constexpr int kElems = Vector<T>::kElems;
  float values[kElems];
  unpack(vector, values);
#pragma unroll
  for (float& value : values) {
    value = divisor.lift(value);
  }
  if (kValues == Values::Any || divisor.may_meet_infinity()) {
#pragma unroll
    for (float& value : values) {
      value = Divisor::limit(value);
    }
  }
  Quantized<T> result;
#pragma unroll
  for (int i = 0; i < kElems; i += 4) {
    unsigned const low = to_fp8x2(divisor.divide(values[i]), divisor.divide(values[i + 1]));
    unsigned const high = to_fp8x2(divisor.divide(values[i + 2]), divisor.divide(values[i + 3]));
    result.words[i / 4] = low | high << 16;
  }
  return result;
}

/// Writes the values from `first` on, no more than the `left` that the row still has.
template <class T, Access kAccess>
__device__ void store(Quantized<T> const& quantized, std::uint8_t* first, int left) {
  constexpr int kElems = Vector<T>::kElems;
  if constexpr (kAccess == Access::Vector) {
    if (left > 0) {
      if constexpr (kElems == 8) {
        *reinterpret_cast<uint2*>(first) = {quantized.words[0], quantized.words[1]};
      } else {
        *reinterpret_cast<unsigned*>(first) = quantized.words[0];
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      if (i < left) {
        first[i] = static_cast<std::uint8_t>(quantized.words[i / 4] >> (i % 4 * 8));
      }
    }
  }
}

/// The largest over `kLanes` neighbouring lanes, in all of them.
template <int kLanes>
__device__ float largest_of_lanes(float largest) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  return largest;
}

}  // namespace moe_ext::quantize
