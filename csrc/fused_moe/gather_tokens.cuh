// A token's values, read once, and the rows of its slots, which all get them.
#pragma once

#include <algorithm>
#include <limits>

#include "common/check.hpp"
#include "common/math.hpp"
#include "fused_moe/gather_rows.cuh"
#include "fused_moe/sort.hpp"

namespace moe_ext::fused_moe::gather {

static_assert(kMaxTopK <= kWarp, "a lane holds the row of one slot");

/// Up to so many values of x, which an H200 reads in about a microsecond, those of tokens without rows are read in vain
/// sooner than waited for.
inline constexpr std::int64_t kEarlyValues = 132 * 32 * 512;

/// What is the same for all tokens. Where tokens are few, each is read several times, for a share of its slots.
struct TokenSource {
  GatherParams problem;
  cutlass::FastDivmod shares;  // of a token
  int slots_per_share;
  bool loads_early;  // before it is known whether the token has rows
};

/// Makes up to `busy` units of work out of `units`, as far as a token's slots can be shared out.
inline TokenSource make_token_source(GatherParams const& params, std::int64_t units, std::int64_t busy) {
  int const wanted = static_cast<int>(std::clamp<std::int64_t>(busy / units, 1, params.top_k));
  int const slots = static_cast<int>(ceil_div(params.top_k, wanted));
  return {.problem = params,
          .shares = cutlass::FastDivmod(static_cast<int>(ceil_div(params.top_k, slots))),
          .slots_per_share = slots,
          .loads_early = params.num_tokens * params.hidden_size <= kEarlyValues};
}

/// As the device counts them in 32 bits, with room for what is counted past the end.
inline int checked_units(std::int64_t units) {
  constexpr std::int64_t kMost = std::numeric_limits<int>::max() - (1 << 20);
  check_value(
      units <= kMost, "gather_quantize: tokens times hidden size must be smaller, got ", units, " chunks");
  return static_cast<int>(units);
}

/// A share of a token's slots, in a warp.
struct Token {
  Element const* x;
  int left;  // columns: all, or none where there is nothing to do
  int row;   // of the lane's slot, as slot_row has it: not looked at before it has to be
};

__device__ inline bool is_row(GatherParams const& problem, int row) {
  return static_cast<unsigned>(row) < static_cast<unsigned>(problem.max_rows);
}

/// For all lanes of a warp together.
__device__ inline bool has_rows(GatherParams const& problem, Token const& token) {
  return __any_sync(0xffffffffu, is_row(problem, token.row));
}

/// Share `index` of those of all tokens, which may be past the end.
__device__ inline Token find_token(TokenSource const& source, int index) {
  GatherParams const& problem = source.problem;
  int token, share;
  source.shares(token, share, index);
  Token result{.x = static_cast<Element const*>(problem.x) + token * problem.x_row_stride,
               .left = token < problem.num_tokens ? problem.hidden_size : 0,
               .row = -1};
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int const slot = share * source.slots_per_share + lane;
  if (result.left > 0 && lane < source.slots_per_share && slot < problem.top_k) {
    result.row = problem.slot_row[token * std::int64_t{problem.top_k} + slot];
  }
  return result;
}

/// Whether the token has no rows, where that is worth the wait. For all lanes together.
__device__ inline bool is_dropped(TokenSource const& source, Token const& token) {
  return !source.loads_early && !has_rows(source.problem, token);
}

/// Calls `store(offset)` for each row of the share, with the elements of `out` before it, all lanes of a warp together.
/// Each lane finds that of its own row, which then takes no multiplication in the loop.
template <class Store>
__device__ void for_each_row(TokenSource const& source, Token const& token, Store const& store) {
  constexpr std::int64_t kNone = -1;
  GatherParams const& problem = source.problem;
  std::int64_t const own = is_row(problem, token.row) ? token.row * problem.out_row_stride : kNone;
  for (int i = 0; i < source.slots_per_share; ++i) {
    auto const offset = static_cast<std::int64_t>(__shfl_sync(0xffffffffu, static_cast<long long>(own), i));
    if (offset != kNone) {
      store(offset);
    }
  }
}

/// Neighbouring columns of a lane, so that their FP8 values are stored as one.
template <int kVectors>
__device__ void load_neighbours(Element const* first, int left, RowVector (&vectors)[kVectors]) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    vectors[i] = load_row_vector(first + i * RowVector::kElems, left - i * RowVector::kElems);
  }
}

/// FP8 values of a lane's neighbouring columns.
template <int kVectors>
struct Neighbours {
  quantize::Quantized<Element> vectors[kVectors];
};

template <quantize::Values kValues, int kVectors>
__device__ Neighbours<kVectors> quantize_all(RowVector const (&vectors)[kVectors],
                                             quantize::Divisor const& divisor) {
  Neighbours<kVectors> result;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    result.vectors[i] = quantize::quantize<Element, kValues>(vectors[i], divisor);
  }
  return result;
}

/// The values from `first` on, no more than the `left` that the row still has.
template <int kVectors>
__device__ void store_fp8(Neighbours<kVectors> const& values, std::uint8_t* first, int left) {
  static_assert(kVectors <= 2, "a store is of 16 bytes at most");
  auto const& head = values.vectors[0].words;
  if constexpr (kVectors == 2) {
    auto const& tail = values.vectors[1].words;
    if (left > RowVector::kElems) {
      *reinterpret_cast<uint4*>(first) = {head[0], head[1], tail[0], tail[1]};
    }
  }
  if (kVectors == 1 ? left > 0 : left == RowVector::kElems) {
    *reinterpret_cast<uint2*>(first) = {head[0], head[1]};
  }
}

}  // namespace moe_ext::fused_moe::gather
