// One scale for all valid rows, from the largest values that the CTAs of a first kernel found.
#include <algorithm>

#include "fused_moe/gather_chunks.cuh"
#include "fused_moe/gather_largest.cuh"
#include "fused_moe/gather_launch.hpp"

namespace moe_ext::fused_moe::gather {
namespace {

struct TensorParams {
  ChunkParams chunks;
  int num_partials;
};

/// partials[cta] = the largest magnitude among the chunks of its teams: every gridDim-th CTA's worth of them.
template <int kBlocks>
__global__ __launch_bounds__(quantize::kChunkThreads) void gather_largest_kernel(
    __grid_constant__ ChunkParams const params) {
  wait_for_previous_kernel(params.source.problem);
  GatherParams const& problem = params.source.problem;
  int const thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  int const stride = static_cast<int>(gridDim.x * blockDim.x) / kTeam;
  int const end = valid_rows(problem) * params.chunks_per_row.divisor;
  float largest = 0.0f;
  for (int index = thread / kTeam; index < end; index += stride) {
    auto const chunk = load_chunk<kBlocks>(params, index);
#pragma unroll
    for (RowVector const& vector : chunk.vectors) {
      largest = fmaxf(largest, quantize::largest_of(vector));
    }
  }
  largest = largest_of_cta(largest);
  if (threadIdx.x == 0) {
    problem.partials[blockIdx.x] = largest;
  }
}

template <int kBlocks>
__global__ __launch_bounds__(quantize::kChunkThreads) void gather_tensor_scale_kernel(
    __grid_constant__ TensorParams const params) {
  wait_for_previous_kernel(params.chunks.source.problem);
  GatherParams const& problem = params.chunks.source.problem;
  auto const chunk = load_own_chunk<kBlocks>(params.chunks);
  float const scale = scale_of_partials(problem, params.num_partials);
  quantize::Divisor const divisor(scale);
  std::uint8_t* const out = fp8_row(problem, chunk.row) + chunk.column;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    auto const values = quantize::quantize<Element, quantize::Values::Any>(chunk.vectors[i], divisor);
    store_fp8(values, out + i * quantize::kBlock, chunk.left - i * quantize::kBlock);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *problem.scale = scale;
  }
}

}  // namespace

int find_largest(GatherParams const& params, cudaStream_t stream) {
  int num_partials = 0;
  with_chunk_size(params, [&]<int kBlocks>(int threads) {
    ChunkParams const chunks = make_chunk_params<kBlocks>(params);
    LaunchShape shape = chunk_shape(chunks, threads);
    shape.grid = std::min(shape.grid, static_cast<unsigned>(params.num_partials));
    num_partials = static_cast<int>(shape.grid);
    launch_kernel(gather_largest_kernel<kBlocks>, shape, stream, chunks);
  });
  return num_partials;
}

void by_tensor(GatherParams const& params, cudaStream_t stream) {
  int const num_partials = find_largest(params, stream);
  with_chunk_size(params, [&]<int kBlocks>(int threads) {
    TensorParams const kernel_params{.chunks = make_chunk_params<kBlocks>(params),
                                     .num_partials = num_partials};
    LaunchShape const shape = chunk_shape(kernel_params.chunks, threads);
    launch_kernel(gather_tensor_scale_kernel<kBlocks>, shape, stream, kernel_params);
  });
}

}  // namespace moe_ext::fused_moe::gather
