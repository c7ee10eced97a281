// A scale for each 128 values of a row.
#include "fused_moe/gather_launch.hpp"
#include "fused_moe/gather_row_blocks.cuh"

namespace moe_ext::fused_moe::gather {
namespace {

template <int kBlocks>
__global__ __launch_bounds__(quantize::kChunkThreads) void gather_row_blocks_kernel(
    __grid_constant__ ChunkParams const params) {
  quantise_row_blocks<kBlocks>(params, static_cast<int>(blockIdx.x));
}

}  // namespace

void by_row_blocks(GatherParams const& params, cudaStream_t stream) {
  with_chunk_size(params, [&]<int kBlocks>(int threads) {
    ChunkParams const kernel_params = make_chunk_params<kBlocks>(params);
    launch_kernel(
        gather_row_blocks_kernel<kBlocks>, chunk_shape(kernel_params, threads), stream, kernel_params);
  });
}

}  // namespace moe_ext::fused_moe::gather
