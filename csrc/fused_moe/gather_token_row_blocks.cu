// 1 x 128 by token: 16 or 8 lanes of a warp share a block and find its scale.
#include "fused_moe/gather_launch.hpp"
#include "fused_moe/gather_token_chunks.cuh"

namespace moe_ext::fused_moe::gather {
namespace {

/// The scales of the warp's blocks, of which each lane holds that of its own, for as many rows at a time as there are
/// lanes: not a store of a few lanes for each row.
template <int kVectors>
__device__ void store_scales(TokenSource const& source, TokenChunk const& chunk, float own_scale) {
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kBlocks = kWarpColumns<kVectors> / quantize::kBlock;
  constexpr int kTeam = kWarp / kBlocks;  // lanes of a block, and rows at a time
  GatherParams const& problem = source.problem;
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int const block = lane % kBlocks;
  float const scale = __shfl_sync(kAll, own_scale, block * kTeam);
  bool const has_block = block * quantize::kBlock < chunk.token.left;
#pragma unroll 1
  for (int first = 0; first < source.slots_per_share; first += kTeam) {
    int const row = __shfl_sync(kAll, chunk.token.row, first + lane / kBlocks);
    if (has_block && is_row(problem, row)) {
      problem.scale[row * problem.scale_row_stride + chunk.column / quantize::kBlock + block] = scale;
    }
  }
}

template <int kVectors>
__global__ __launch_bounds__(quantize::kChunkThreads) void gather_token_row_blocks_kernel(
    __grid_constant__ TokenChunkParams const params) {
  wait_for_previous_kernel(params.source.problem);
  TokenChunk const chunk = find_token_chunk<kVectors>(params, warp_index());
  if (is_dropped(params.source, chunk.token)) {
    return;
  }
  int const column = lane_column<kVectors>();
  RowVector vectors[kVectors];
  load_neighbours(chunk.token.x + column, chunk.token.left - column, vectors);
  // Lanes without values stay for the shuffles.
  constexpr int kTeam = quantize::kBlock / (kVectors * RowVector::kElems);
  float const scale = quantize::scale_of(quantize::largest_of_lanes<kTeam>(largest_of(vectors)), false);
  auto const values = quantize_all<quantize::Values::OfTheScale>(vectors, quantize::Divisor(scale));
  store_rows(params.source, chunk, values);
  store_scales<kVectors>(params.source, chunk, scale);
}

}  // namespace

void tokens_by_row_blocks(GatherParams const& params, cudaStream_t stream) {
  with_token_chunk_size(params, [&]<int kVectors>(int threads) {
    TokenChunkParams const kernel_params = make_token_chunk_params<kVectors>(params);
    launch_kernel(gather_token_row_blocks_kernel<kVectors>,
                  token_chunk_shape(kernel_params, threads),
                  stream,
                  kernel_params);
  });
}

}  // namespace moe_ext::fused_moe::gather
