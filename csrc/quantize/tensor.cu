// One scale for each group: given, or from the largest values that the CTAs of a first kernel found. No atomics, and
// nothing to be zeroed before.
#include <algorithm>

#include "quantize/chunks.cuh"
#include "quantize/dispatch.cuh"
#include "quantize/launch.hpp"

namespace moe_ext::quantize {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = kChunkThreads / kWarp;

struct TensorParams {
  Params problem;
  cutlass::FastDivmod chunks_per_row;
  cutlass::FastDivmod ctas_per_group;
  int num_chunks;  // of a group
};

/// The largest over the CTA, in all threads.
__device__ float largest_of_cta(float largest) {
  __shared__ float of_warps[kWarps];
  largest = largest_of_lanes<kWarp>(largest);
  if (threadIdx.x % kWarp == 0) {
    of_warps[threadIdx.x / kWarp] = largest;
  }
  __syncthreads();
  return largest_of_lanes<kWarps>(of_warps[threadIdx.x % kWarps]);
}

/// partials[group][cta] = the largest magnitude among the chunks cta, cta + ctas, ...
template <class T, Access kAccess>
__global__ __launch_bounds__(kChunkThreads) void largest_kernel(__grid_constant__ TensorParams const params) {
  int group, cta;
  params.ctas_per_group(group, cta, static_cast<int>(blockIdx.x));
  int const rows = valid_rows(params.problem, group);
  int const stride = params.ctas_per_group.divisor * Chunks<T>::kTeams;
  float largest = 0.0f;
  int index = cta * Chunks<T>::kTeams + static_cast<int>(threadIdx.x) / Chunks<T>::kTeam;
  for (; index < params.num_chunks; index += stride) {
    int row, chunk;
    params.chunks_per_row(row, chunk, index);
    if (row >= rows) {
      break;
    }
    int const column = chunk_column<T>(chunk);
    auto const vectors =
        load_chunk<T, kAccess>(x_row<T>(params.problem, group, row) + column, params.problem.k - column);
#pragma unroll
    for (Vector<T> const& vector : vectors.blocks) {
      largest = fmaxf(largest, largest_of(vector));
    }
  }
  largest = largest_of_cta(largest);
  if (threadIdx.x == 0) {
    params.problem.partials[blockIdx.x] = largest;
  }
}

/// The scale of a group, the same in all threads of the CTA.
__device__ float scale_of_group(Params const& problem, int group) {
  if (problem.static_scale != nullptr) {
    return problem.static_scale[group * problem.static_scale_stride];
  }
  float const* const partials = problem.partials + std::int64_t{group} * problem.partials_per_group;
  float largest = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < problem.partials_per_group; i += kChunkThreads) {
    largest = fmaxf(largest, partials[i]);
  }
  return scale_of(largest_of_cta(largest), problem.power_of_two);
}

template <class T, Access kAccess>
__global__ __launch_bounds__(kChunkThreads) void tensor_kernel(__grid_constant__ TensorParams const params) {
  Params const& problem = params.problem;
  int group, cta;
  // From the end: what the first kernel read last is what L2 still holds.
  params.ctas_per_group(group, cta, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  int const index = cta * Chunks<T>::kTeams + static_cast<int>(threadIdx.x) / Chunks<T>::kTeam;
  int row, chunk;
  params.chunks_per_row(row, chunk, index);
  bool const active = index < params.num_chunks && row < valid_rows(problem, group);
  int const column = chunk_column<T>(chunk);
  int const left = active ? problem.k - column : 0;
  auto const vectors = load_chunk<T, kAccess>(x_row<T>(problem, group, row) + column, left);
  float const scale = scale_of_group(problem, group);
  Divisor const divisor(scale);
  std::uint8_t* const out = q_row(problem, group, row) + column;
#pragma unroll
  for (int i = 0; i < kChunkBlocks; ++i) {
    store<T, kAccess>(
        quantize<T, Values::Any>(vectors.blocks[i], divisor), out + i * kBlock, left - i * kBlock);
  }
  if (cta == 0 && threadIdx.x == 0) {
    scale_at(problem, group, 0, 0) = scale;
  }
}

}  // namespace

void quantize_tensor(Params const& params, cudaStream_t stream) {
  int const in_row = chunks_per_row(params.k);
  TensorParams kernel_params{.problem = params,
                             .chunks_per_row = cutlass::FastDivmod(in_row),
                             .ctas_per_group = cutlass::FastDivmod(std::max(params.partials_per_group, 1)),
                             .num_chunks = params.rows * in_row};
  dispatch(params, [&]<class T, Access kAccess>() {
    if (params.static_scale == nullptr) {
      int const grid = params.groups * params.partials_per_group;
      largest_kernel<T, kAccess><<<grid, kChunkThreads, 0, stream>>>(kernel_params);
      check_cuda(cudaGetLastError(), "launching largest_kernel");
    }
    int const ctas = (kernel_params.num_chunks + Chunks<T>::kTeams - 1) / Chunks<T>::kTeams;
    kernel_params.ctas_per_group = cutlass::FastDivmod(ctas);
    tensor_kernel<T, kAccess><<<params.groups * ctas, kChunkThreads, 0, stream>>>(kernel_params);
  });
  check_cuda(cudaGetLastError(), "launching tensor_kernel");
}

}  // namespace moe_ext::quantize
