// Everything one launch of a grouped GEMM needs, as plain pointers and sizes.
#pragma once

#include <cstdint>
#include <limits>

#include "grouped_gemm/tiling.hpp"

namespace moe_ext::grouped_gemm {

/// Dtype of the result and of a bias.
enum class OutDtype { BF16, FP32 };

/// Scales of `a`: data[group * group_shift + row * row_stride + k_block * k_stride]; null is 1, a stride of 0 repeats.
/// `group_shift` is 0 where rows of all groups are a row_stride apart.
struct TokenScales {
  float const* data;
  std::int64_t row_stride;
  std::int64_t k_stride;
  std::int64_t group_shift;
  int const* token_of_row = nullptr;  // if not null, a row's scales are those of row token_of_row[row]
};

/// Scales of `b`. Without blocks: data[group * group_stride + n * n_stride]. With blocks of 128 x 128: the n rows are
/// `segments` equal parts (gate and up), each with blocks of its own, the first of which lacks its first `n_offset`
/// rows: data[group * group_stride + segment * segment_stride + n_block * n_stride + k_block * k_stride]. Likewise the
/// first block along k lacks its first `k_offset` elements.
struct WeightScales {
  float const* data;
  std::int64_t group_stride;
  std::int64_t segment_stride;
  std::int64_t n_stride;
  std::int64_t k_stride;
  int segment_n;       // rows of a segment
  int segment_blocks;  // blocks of a segment along n
  int n_offset;
  int k_offset;
};

/// What is added to every row of a group: data[group * group_stride + n * n_stride]; null is 0.
struct Bias {
  void const* data;
  std::int64_t group_stride;  // elements
  std::int64_t n_stride;
  OutDtype dtype;
};

/// How gate and up meet: g * sigmoid(g * (linear + cubic * s + quintic * s^2)) * (u + up_offset), where g is gate up to
/// `gate_limit`, s is g^2 up to 36, and u is up within -up_limit and up_limit. python/moe_ext/_activations.py has the
/// numbers that make it each activation.
/// Gate row f of b[group] is row f / 8 * slab_step + f % 8 * feature_step, up row f is up_step further: 0 where an
/// activation has no up rows.
struct Gating {
  float linear;
  float cubic;
  float quintic;
  float gate_limit;  // infinity for none
  float up_limit;
  float up_offset;
  int feature_step;
  int up_step;
  int slab_step;
  bool joins;  // false: nothing is joined, and the rows are stored as they are
};

/// Whether gate meets up by silu(g) * (u + up_offset).
MOE_EXT_HOST_DEVICE constexpr bool is_swiglu(Gating const& gating) {
  constexpr float kNone = std::numeric_limits<float>::infinity();
  return gating.linear == 1.f && gating.cubic == 0.f && gating.quintic == 0.f && gating.gate_limit == kNone &&
         gating.up_limit == kNone;
}

/// Of a product whose rows are taken as they lie: every 16 of them as 8 of gate, 8 of up.
inline constexpr Gating kPlainRows{.linear = 0.f,
                                   .cubic = 0.f,
                                   .quintic = 0.f,
                                   .gate_limit = 0.f,
                                   .up_limit = 0.f,
                                   .up_offset = 0.f,
                                   .feature_step = 1,
                                   .up_step = 8,
                                   .slab_step = 16,
                                   .joins = false};

/// Where gated kernels that can quantise leave FP8 in place of bf16: value (row, feature), and either by the one scale
/// that is given (`quantises_by_one_scale`) or by scales of its own for each row's every 128 features
/// (`quantises_features`).
struct QuantisedFeatures {
  unsigned char* values;  // null: bf16 to `out`
  std::int64_t row_stride;
  float* scale;  // made here
  std::int64_t scale_row_stride;
  float const* static_scale;
};

/// What of a launch waits for the previous kernel in the stream to have ended. Whoever waits for the launch has waited
/// for that kernel too, whichever it is.
enum class Wait : int {
  ForAll,     // everything
  ForTokens,  // all but the walk over `offs` and loads of `b`: both were final before the previous kernel began
  AtEnd  // only its end: all it reads was final before the previous kernel let it begin, and neither that one nor
         // another that has not been waited for reads or writes where this one writes
};

struct Params {
  void const* a;  // (num_rows, k), K contiguous
  void const* b;  // (num_groups, n, k), K contiguous
  GroupRows groups;
  TokenScales scale_a;
  WeightScales scale_b;
  Bias bias;
  Gating gating = kPlainRows;
  QuantisedFeatures quantised = {};
  void* out;  // (num_rows, n), gated (num_rows, n / 2), N contiguous
  std::int64_t n;
  std::int64_t k;
  std::int64_t a_row_stride_bytes;
  std::int64_t b_row_stride_bytes;
  std::int64_t b_group_stride_bytes;
  std::int64_t out_row_stride;  // elements
  OutDtype out_dtype;
  Wait wait;
  int device;
  int sm_count;
  /// Not null, for kernels that can (`gathers_tokens`): row r of the groups is row token_of_row[r] of `a`, and so are
  /// its scales.
  int const* token_of_row = nullptr;
  bool programmatic =
      false;  // of Wait::ForAll: may begin before the previous kernel has ended, as all others do
  std::int64_t expected_rows = -1;  // that the groups may have, for choices alone; -1: groups.num_rows
  int spared_ctas = 0;              // of those that run at the same time, for a launch beside this one
};

}  // namespace moe_ext::grouped_gemm
