// Tokens copied to their rows, or quantised by a scale that is known.
#include "fused_moe/gather_launch.hpp"
#include "fused_moe/gather_token_chunks.cuh"

namespace moe_ext::fused_moe::gather {
namespace {

template <int kVectors>
__global__ __launch_bounds__(quantize::kChunkThreads) void gather_token_copy_kernel(
    __grid_constant__ TokenChunkParams const params) {
  GatherParams const& problem = params.source.problem;
  wait_for_previous_kernel(problem);
  TokenChunk const chunk = find_token_chunk<kVectors>(params, warp_index());
  if (is_dropped(params.source, chunk.token)) {
    return;
  }
  // A warp's vectors lie side by side, so that each of its stores fills whole sectors.
  constexpr int kStep = kWarpColumns<1>;
  int const column = lane_column<1>();
  int const left = chunk.token.left - column;
  RowVector vectors[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    vectors[i] = load_row_vector(chunk.token.x + column + i * kStep, left - i * kStep);
  }
  Element* const out = static_cast<Element*>(problem.out) + chunk.column + column;
  for_each_row(params.source, chunk.token, [&](std::int64_t offset) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (left > i * kStep) {
        *reinterpret_cast<uint4*>(out + offset + i * kStep) = vectors[i].words;
      }
    }
  });
}

template <int kVectors>
__global__ __launch_bounds__(quantize::kChunkThreads) void gather_token_static_scale_kernel(
    __grid_constant__ TokenChunkParams const params) {
  GatherParams const& problem = params.source.problem;
  wait_for_previous_kernel(problem);
  float const scale = *problem.static_scale;
  TokenChunk const chunk = find_token_chunk<kVectors>(params, warp_index());
  if (is_dropped(params.source, chunk.token)) {
    return;
  }
  int const column = lane_column<kVectors>();
  RowVector vectors[kVectors];
  load_neighbours(chunk.token.x + column, chunk.token.left - column, vectors);
  auto const values = quantize_all<quantize::Values::Any>(vectors, quantize::Divisor(scale));
  store_rows(params.source, chunk, values);
}

}  // namespace

void tokens_plainly(GatherParams const& params, cudaStream_t stream) {
  with_token_chunk_size(params, [&]<int kVectors>(int threads) {
    auto* const kernel = params.format == GatherFormat::BF16 ? gather_token_copy_kernel<kVectors>
                                                             : gather_token_static_scale_kernel<kVectors>;
    TokenChunkParams const kernel_params = make_token_chunk_params<kVectors>(params);
    launch_kernel(kernel, token_chunk_shape(kernel_params, threads), stream, kernel_params);
  });
}

}  // namespace moe_ext::fused_moe::gather
