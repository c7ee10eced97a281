// 1 x 128: a team of 16 or 32 threads holds 128 values in registers, four blocks of a row at a time.
#include "quantize/chunks.cuh"
#include "quantize/dispatch.cuh"
#include "quantize/launch.hpp"

namespace moe_ext::quantize {
namespace {

struct RowBlocksParams {
  Params problem;
  cutlass::FastDivmod chunks_per_row;
  cutlass::FastDivmod rows_per_group;
  int num_chunks;  // of all rows of all groups
};

/// Six CTAs an SM: 96 KiB of vectors on the way. Single elements need more registers than that leaves.
template <Access kAccess>
inline constexpr int kCtasPerSm = kAccess == Access::Vector ? 6 : 1;

template <class T, Access kAccess>
__global__ __launch_bounds__(kChunkThreads, kCtasPerSm<kAccess>) void row_blocks_kernel(
    __grid_constant__ RowBlocksParams const params) {
  constexpr int kTeam = Chunks<T>::kTeam;
  Params const& problem = params.problem;
  int const index = static_cast<int>(blockIdx.x) * Chunks<T>::kTeams + static_cast<int>(threadIdx.x) / kTeam;
  int flat_row, chunk, group, row;
  params.chunks_per_row(flat_row, chunk, index);
  params.rows_per_group(group, row, flat_row);
  // Lanes without work stay for the shuffles.
  bool const active = index < params.num_chunks && row < valid_rows(problem, group);
  int const column = chunk_column<T>(chunk);
  int const left = active ? problem.k - column : 0;
  auto const vectors = load_chunk<T, kAccess>(x_row<T>(problem, group, row) + column, left);
  float largest[kChunkBlocks];
#pragma unroll
  for (int i = 0; i < kChunkBlocks; ++i) {
    largest[i] = largest_of(vectors.blocks[i]);
  }
  float const own_scale = scale_of(largest_of_own_block<T>(largest), problem.power_of_two);
  float const own_reciprocal = Divisor::reciprocal_of(own_scale);
  int const block = chunk * kChunkBlocks + own_block<T>();
  constexpr int kOwners = kTeam / kChunkBlocks;  // of a block
  if (active && threadIdx.x % kOwners == 0 && block * kBlock < problem.k) {
    scale_at(problem, group, row, block) = own_scale;
  }
  std::uint8_t* const out = q_row(problem, group, row) + column;
#pragma unroll
  for (int i = 0; i < kChunkBlocks; ++i) {
    Divisor const divisor(__shfl_sync(0xffffffffu, own_scale, i * kOwners, kTeam),
                          __shfl_sync(0xffffffffu, own_reciprocal, i * kOwners, kTeam));
    store<T, kAccess>(
        quantize<T, Values::OfTheScale>(vectors.blocks[i], divisor), out + i * kBlock, left - i * kBlock);
  }
}

}  // namespace

void quantize_row_blocks(Params const& params, cudaStream_t stream) {
  int const in_row = chunks_per_row(params.k);
  RowBlocksParams const kernel_params{.problem = params,
                                      .chunks_per_row = cutlass::FastDivmod(in_row),
                                      .rows_per_group = cutlass::FastDivmod(params.rows),
                                      .num_chunks = params.groups * params.rows * in_row};
  dispatch(params, [&]<class T, Access kAccess>() {
    int const grid = (kernel_params.num_chunks + Chunks<T>::kTeams - 1) / Chunks<T>::kTeams;
    row_blocks_kernel<T, kAccess><<<grid, kChunkThreads, 0, stream>>>(kernel_params);
  });
  check_cuda(cudaGetLastError(), "launching row_blocks_kernel");
}

}  // namespace moe_ext::quantize
