// Rows cut into chunks of 128 or 512 columns, one for each team of 16 threads: as many CTAs as there is work for, since
// no two chunks need each other.
#pragma once

#include <limits>

#include "common/launch.hpp"
#include "common/math.hpp"
#include "fused_moe/gather_rows.cuh"
#include "quantize/chunks.cuh"

namespace moe_ext::fused_moe::gather {

inline constexpr int kTeam = quantize::Chunks<Element>::kTeam;
inline constexpr int kManyBlocks = quantize::kChunkBlocks;
inline constexpr int kFewChunkThreads = 128;
/// With fewer chunks of 512 columns than this, about one CTA an SM, threads take a vector each, not four.
inline constexpr std::int64_t kFewChunks = 132 * quantize::kChunkThreads / kTeam;

struct ChunkParams {
  RowSource source;
  cutlass::FastDivmod chunks_per_row;
  int num_chunks;  // of all rows
};

/// A team's part of a row.
template <int kBlocks>
struct Chunk {
  RowVector vectors[kBlocks];
  int row;
  int index;   // of the row's chunks
  int column;  // of the thread's first vector
  int left;    // columns from there to the end of the row, none where there is no row
};

/// The chunk of this thread's team in CTA `cta`.
template <int kBlocks>
__device__ Chunk<kBlocks> load_own_chunk(ChunkParams const& params, RowSpan rows, int cta) {
  int const thread = cta * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  Chunk<kBlocks> chunk;
  params.chunks_per_row(chunk.row, chunk.index, thread / kTeam);
  Row const row = find_row(params.source, chunk.row, rows);
  chunk.column =
      chunk.index * kBlocks * quantize::kBlock + static_cast<int>(threadIdx.x) % kTeam * RowVector::kElems;
  chunk.left = row.x == nullptr ? 0 : params.source.problem.hidden_size - chunk.column;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    chunk.vectors[i] =
        load_row_vector(row.x + chunk.column + i * quantize::kBlock, chunk.left - i * quantize::kBlock);
  }
  if (params.source.problem.weights_type != GatherWeights::None) {
#pragma unroll
    for (RowVector& vector : chunk.vectors) {
      apply_weight(vector, row.weight);
    }
  }
  return chunk;
}

template <int kBlocks>
ChunkParams make_chunk_params(GatherParams const& params) {
  std::int64_t const in_row = ceil_div(params.hidden_size, kBlocks * quantize::kBlock);
  std::int64_t const all = in_row * params.max_rows;
  constexpr std::int64_t kMost = (std::int64_t{std::numeric_limits<int>::max()} - (1 << 16)) / kTeam;
  check_value(all <= kMost, "gather_quantize: rows times hidden size must be smaller, got ", all, " chunks");
  return {.source = make_row_source(params),
          .chunks_per_row = cutlass::FastDivmod(static_cast<int>(in_row)),
          .num_chunks = static_cast<int>(all)};
}

inline bool has_few_chunks(GatherParams const& params) {
  return ceil_div(params.hidden_size, kManyBlocks * quantize::kBlock) * params.max_rows < kFewChunks;
}

/// Calls `function.template operator()<kBlocks>(threads)` for a size of chunk that keeps all SMs at work.
template <class Function>
void with_chunk_size(GatherParams const& params, Function const& function) {
  if (has_few_chunks(params)) {
    function.template operator()<1>(kFewChunkThreads);
  } else {
    function.template operator()<kManyBlocks>(quantize::kChunkThreads);
  }
}

inline LaunchShape chunk_shape(ChunkParams const& params, int threads) {
  return {.grid = static_cast<unsigned>(ceil_div(params.num_chunks, threads / kTeam)),
          .threads = static_cast<unsigned>(threads),
          .cluster = 1,
          .shared_bytes = 0,
          .programmatic = params.source.problem.programmatic};
}

}  // namespace moe_ext::fused_moe::gather
