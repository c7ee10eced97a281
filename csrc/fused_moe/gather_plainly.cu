// Rows copied, or quantised by a scale that is known.
#include "fused_moe/gather_launch.hpp"
#include "fused_moe/gather_static_scale.cuh"

namespace moe_ext::fused_moe::gather {
namespace {

template <int kBlocks>
__global__ __launch_bounds__(quantize::kChunkThreads) void gather_copy_kernel(
    __grid_constant__ ChunkParams const params) {
  RowsAtWork const rows(params.source.problem);
  GatherParams const& problem = params.source.problem;
  auto const chunk = load_own_chunk<kBlocks>(params, rows, static_cast<int>(blockIdx.x));
  Element* const out = static_cast<Element*>(problem.out) + chunk.row * problem.out_row_stride + chunk.column;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    if (chunk.left > i * quantize::kBlock) {
      *reinterpret_cast<uint4*>(out + i * quantize::kBlock) = chunk.vectors[i].words;
    }
  }
}

template <int kBlocks>
__global__ __launch_bounds__(quantize::kChunkThreads) void gather_static_scale_kernel(
    __grid_constant__ ChunkParams const params) {
  quantise_by_static_scale<kBlocks>(params, static_cast<int>(blockIdx.x));
}

}  // namespace

void plainly(GatherParams const& params, cudaStream_t stream) {
  with_chunk_size(params, [&]<int kBlocks>(int threads) {
    auto* const kernel = params.format == GatherFormat::BF16 ? gather_copy_kernel<kBlocks>
                                                             : gather_static_scale_kernel<kBlocks>;
    ChunkParams const kernel_params = make_chunk_params<kBlocks>(params);
    launch_kernel(kernel, chunk_shape(kernel_params, threads), stream, kernel_params);
  });
}

}  // namespace moe_ext::fused_moe::gather
