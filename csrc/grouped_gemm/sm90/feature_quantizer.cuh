// Features of a row to FP8 with a scale for each 128 of them, where a tile has them all: the next GEMM's operand.
#pragma once

#include <cuda_bf16.h>

#include "grouped_gemm/sm90/activation.cuh"
#include "grouped_gemm/sm90/epilogue_params.cuh"
#include "grouped_gemm/sm90/mainloop.cuh"
#include "quantize/vectors.cuh"

namespace moe_ext::grouped_gemm {

/// Quantises 64 rows of a warp group, in plain order: a row's sums are with 4 neighbouring lanes. Features are rounded
/// to bf16 first, so that the values are bit for bit those of storing them and quantising what was stored.
template <class ConfigTag>
struct FeatureQuantizer {
  using T = Traits<ConfigTag>;
  static constexpr bool kFits = quantises_features(T::kConfig);
  static constexpr int kOctets = kScaleBlock / 8;  // of features: 8 columns of gate, 8 of up
  static constexpr int kRows = 64;
  static constexpr int kStagingBytes = kFits ? kRows * kScaleBlock : 0;

  EpilogueParams const& params;
  unsigned char* staging;  // kStagingBytes of the warp group's own
  int thread;              // within the warp group

  /// Joins gate and up and leaves the rows below `token_end` in `staging`, their scales in memory.
  __device__ void stage(float const* sums, int token, int token_end, int block) const {
    unsigned features[2][kOctets];  // bf16 pairs of the thread's first row, of its second
    if (is_swiglu(params.gating)) {
      join_rows(JoinSwiglu{params.gating}, sums, features);
    } else {
      join_rows(Join{params.gating}, sums, features);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      quantize_row(features[half], accumulator_row(thread) + 8 * half, token, token_end, block);
    }
  }

  /// Staged rows below `token_end` to memory, 16 bytes a thread, 8 where that is all there is of the last.
  __device__ void copy_rows(int token, int token_end, int block) const {
    constexpr int kPieces = kScaleBlock / 16;
    constexpr int kRowsAtOnce = 128 / kPieces;
    int const piece = thread % kPieces;
    int const feature = block * kScaleBlock + piece * 16;
    int const left = params.n / 2 - feature;
    unsigned char* const out = params.quantised.values + feature;
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
      int const row = thread / kPieces + i * kRowsAtOnce;
      if (token + row < token_end && left > 0) {
        auto const words = *reinterpret_cast<uint4 const*>(staging + offset(row, piece));
        auto* const target = out + (token + row) * params.quantised.row_stride;
        if (left >= 16) {
          *reinterpret_cast<uint4*>(target) = words;
        } else {
          *reinterpret_cast<uint2*>(target) = {words.x, words.y};
        }
      }
    }
  }

 private:
  using Vector = quantize::Vector<__nv_bfloat16>;

  template <class JoinBy>
  __device__ static void join_rows(JoinBy const& join, float const* sums, unsigned (&features)[2][kOctets]) {
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      float const* const v = sums + 8 * i;  // two of gate of the first row, of the second; the same of up
      features[0][i] = rounded(join(v[0], v[4]), join(v[1], v[5]));
      features[1][i] = rounded(join(v[2], v[6]), join(v[3], v[7]));
    }
  }

  __device__ static unsigned rounded(float low, float high) {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<unsigned const&>(pair);
  }

  __device__ void quantize_row(
      unsigned const (&features)[kOctets], int row, int token, int token_end, int block) const {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kOctets; i += 4) {
      Vector const vector{{features[i], features[i + 1], features[i + 2], features[i + 3]}};
      largest = fmaxf(largest, quantize::largest_of(vector));
    }
    float const scale = quantize::scale_of(quantize::largest_of_lanes<4>(largest), false);
    if (thread % 4 == 0 && token + row < token_end) {
      params.quantised.scale[(token + row) * params.quantised.scale_row_stride + block] = scale;
    }
    quantize::Divisor const divisor(scale);
#pragma unroll
    for (int i = 0; i < kOctets; i += 4) {
      Vector const vector{{features[i], features[i + 1], features[i + 2], features[i + 3]}};
      auto const values = quantize::quantize<__nv_bfloat16, quantize::Values::OfTheScale>(vector, divisor);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int const octet = i + j;
        auto const bytes = static_cast<unsigned short>(values.words[j / 2] >> (j % 2 * 16));
        *reinterpret_cast<unsigned short*>(staging + offset(row, octet / 2) + octet % 2 * 8 +
                                           accumulator_column(thread)) = bytes;
      }
    }
  }

  /// Rows of 128 bytes begin in one bank: their pieces are permuted by the row.
  __device__ static int offset(int row, int piece) {
    return row * kScaleBlock + (piece ^ row % 8) * 16;
  }
};

}  // namespace moe_ext::grouped_gemm
