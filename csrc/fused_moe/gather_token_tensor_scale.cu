// One scale for all rows, by token: from the largest values that the CTAs of a first kernel found.
#include <algorithm>

#include "fused_moe/gather_largest.cuh"
#include "fused_moe/gather_launch.hpp"
#include "fused_moe/gather_token_chunks.cuh"

namespace moe_ext::fused_moe::gather {
namespace {

struct TokenTensorParams {
  TokenChunkParams chunks;
  int num_partials;
};

/// Leaves a token without rows without values, unless tokens are so few that their values are not to wait. Its warp has
/// to stay for the barrier. For all lanes together.
template <int kVectors>
__device__ void drop_if_without_rows(GatherParams const& problem, Token& token) {
  if (kVectors > 1 && !has_rows(problem, token)) {
    token.left = 0;
  }
}

/// partials[cta] = the largest magnitude among the chunks of its warps that have rows: every gridDim-th CTA's worth.
template <int kVectors>
__global__ __launch_bounds__(quantize::kChunkThreads) void gather_token_largest_kernel(
    __grid_constant__ TokenChunkParams const params) {
  GatherParams const& problem = params.source.problem;
  wait_for_previous_kernel(problem);
  int const stride = static_cast<int>(gridDim.x * blockDim.x) / kWarp;
  int const column = lane_column<kVectors>();
  float largest = 0.0f;
  int index = warp_index();
  TokenChunk chunk = find_token_chunk<kVectors>(params, index);
  while (index < params.num_chunks) {
    // The next rows are on their way meanwhile.
    index += stride;
    TokenChunk const next = find_token_chunk<kVectors>(params, index);
    drop_if_without_rows<kVectors>(problem, chunk.token);
    RowVector vectors[kVectors];
    load_neighbours(chunk.token.x + column, chunk.token.left - column, vectors);
    float const own = largest_of(vectors);
    largest = has_rows(problem, chunk.token) ? fmaxf(largest, own) : largest;
    chunk = next;
  }
  largest = largest_of_cta(largest);
  if (threadIdx.x == 0) {
    problem.partials[blockIdx.x] = largest;
  }
}

template <int kVectors>
__global__ __launch_bounds__(quantize::kChunkThreads) void gather_token_tensor_scale_kernel(
    __grid_constant__ TokenTensorParams const params) {
  GatherParams const& problem = params.chunks.source.problem;
  wait_for_previous_kernel(problem);
  TokenChunk chunk = find_token_chunk<kVectors>(params.chunks, warp_index());
  drop_if_without_rows<kVectors>(problem, chunk.token);
  int const column = lane_column<kVectors>();
  RowVector vectors[kVectors];
  load_neighbours(chunk.token.x + column, chunk.token.left - column, vectors);
  float const scale = scale_of_partials(problem, params.num_partials);
  auto const values = quantize_all<quantize::Values::Any>(vectors, quantize::Divisor(scale));
  store_rows(params.chunks.source, chunk, values);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *problem.scale = scale;
  }
}

}  // namespace

void tokens_by_tensor(GatherParams const& params, cudaStream_t stream) {
  with_token_chunk_size(params, [&]<int kVectors>(int threads) {
    TokenChunkParams const once = make_token_chunk_params<kVectors>(params, 0);
    LaunchShape first = token_chunk_shape(once, threads);
    first.grid = std::min(first.grid, static_cast<unsigned>(params.num_partials));
    launch_kernel(gather_token_largest_kernel<kVectors>, first, stream, once);

    TokenTensorParams const kernel_params{.chunks = make_token_chunk_params<kVectors>(params, kFewWarps),
                                          .num_partials = static_cast<int>(first.grid)};
    launch_kernel(gather_token_tensor_scale_kernel<kVectors>,
                  token_chunk_shape(kernel_params.chunks, threads),
                  stream,
                  kernel_params);
  });
}

}  // namespace moe_ext::fused_moe::gather
