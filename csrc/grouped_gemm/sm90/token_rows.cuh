// Which row of `a` a row of a group is.
#pragma once

#include "grouped_gemm/params.hpp"
#include "grouped_gemm/sm90/traits.cuh"

namespace moe_ext::grouped_gemm {

/// Where tokens are that TMA does not load: row r of the groups is row of_row[r] of `a`.
struct GatheredTokens {
  int const* of_row;  // null: rows are in order, and TMA loads them
  unsigned char const* a;
  unsigned row_pieces;  // of 16 bytes, from row to row
  int k_bytes;          // whole pieces
};

/// The row of `a` whose scales are those of row `row`.
template <class ConfigTag>
__device__ inline int token_of_row(TokenScales const& scales, int row) {
  if constexpr (Traits<ConfigTag>::kGathers && !Traits<ConfigTag>::kGathersScales) {
    if (scales.token_of_row != nullptr) {
      return scales.token_of_row[row];
    }
  }
  return row;
}

}  // namespace moe_ext::grouped_gemm
