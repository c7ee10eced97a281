// Tokens cut into chunks of 256 or 512 columns, one for each warp: as many CTAs as there is work for, since no two
// chunks need each other.
#pragma once

#include "common/launch.hpp"
#include "fused_moe/gather_tokens.cuh"
#include "quantize/chunks.cuh"

namespace moe_ext::fused_moe::gather {

inline constexpr int kManyVectors = 2;  // of a lane: 16 FP8 values, stored as one
inline constexpr int kFewTokenThreads = 128;
/// With fewer warps of 512 columns than this, about eight an SM, lanes take a vector each, not two.
inline constexpr std::int64_t kFewWarps = 132 * quantize::kChunkThreads / kWarp;

template <int kVectors>
inline constexpr int kWarpColumns = kVectors * RowVector::kElems * kWarp;

struct TokenChunkParams {
  TokenSource source;
  cutlass::FastDivmod chunks_per_token;
  int num_chunks;  // of all shares of all tokens
};

/// A warp's part of a token.
struct TokenChunk {
  Token token;  // whose values are those of the chunk
  int column;   // the chunk's first
};

/// Chunk `flat_index` of those of all tokens, which may be past the end. For all lanes of a warp together.
template <int kVectors>
__device__ TokenChunk find_token_chunk(TokenChunkParams const& params, int flat_index) {
  int share, chunk;
  params.chunks_per_token(share, chunk, flat_index);
  TokenChunk result{.token = find_token(params.source, share), .column = chunk * kWarpColumns<kVectors>};
  result.token.x += result.column;
  result.token.left -= result.column;
  return result;
}

__device__ inline int warp_index() {
  return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / kWarp;
}

/// Where the lane's columns begin in the chunk, if they are neighbours.
template <int kVectors>
__device__ int lane_column() {
  return static_cast<int>(threadIdx.x) % kWarp * kVectors * RowVector::kElems;
}

/// Each of the chunk's rows gets the lanes' values.
template <int kVectors>
__device__ void store_rows(TokenSource const& source,
                           TokenChunk const& chunk,
                           Neighbours<kVectors> const& values) {
  int const column = lane_column<kVectors>();
  int const left = chunk.token.left - column;
  std::uint8_t* const out = fp8_row(source.problem, 0) + chunk.column + column;
  for_each_row(source, chunk.token, [&](std::int64_t offset) { store_fp8(values, out + offset, left); });
}

template <int kVectors>
TokenChunkParams make_token_chunk_params(GatherParams const& params) {
  std::int64_t const in_token = ceil_div(params.hidden_size, kWarpColumns<kVectors>);
  TokenSource const source = make_token_source(params, params.num_tokens * in_token, kFewWarps);
  return {.source = source,
          .chunks_per_token = cutlass::FastDivmod(static_cast<int>(in_token)),
          .num_chunks = checked_units(params.num_tokens * source.shares.divisor * in_token)};
}

/// Calls `function.template operator()<kVectors>(threads)` for a size of chunk that keeps all SMs at work.
template <class Function>
void with_token_chunk_size(GatherParams const& params, Function const& function) {
  if (params.num_tokens * ceil_div(params.hidden_size, kWarpColumns<kManyVectors>) < kFewWarps) {
    function.template operator()<1>(kFewTokenThreads);
  } else {
    function.template operator()<kManyVectors>(quantize::kChunkThreads);
  }
}

inline LaunchShape token_chunk_shape(TokenChunkParams const& params, int threads) {
  return {.grid = static_cast<unsigned>(ceil_div(params.num_chunks, threads / kWarp)),
          .threads = static_cast<unsigned>(threads),
          .cluster = 1,
          .shared_bytes = 0,
          .programmatic = params.source.problem.programmatic};
}

}  // namespace moe_ext::fused_moe::gather
