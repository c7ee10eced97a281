// 128 x 128: a CTA holds a tile in registers, 16 rows of it at a time.
#include <cutlass/fast_math.h>

#include "common/check.hpp"
#include "quantize/dispatch.cuh"
#include "quantize/launch.hpp"
#include "quantize/rows.cuh"

namespace moe_ext::quantize {
namespace {

constexpr int kRowsAtATime = 16;
constexpr int kSteps = kBlock / kRowsAtATime;
constexpr int kWarp = 32;

template <class T>
inline constexpr int kRowThreads = kBlock / Vector<T>::kElems;

template <class T>
inline constexpr int kThreads = kRowThreads<T> * kRowsAtATime;

struct TilesParams {
  Params problem;
  cutlass::FastDivmod tiles_along_k;
  cutlass::FastDivmod tiles_along_rows;
};

/// 1024 threads an SM: 128 KiB of vectors on the way. Single elements need more registers than that leaves.
template <class T, Access kAccess>
inline constexpr int kCtasPerSm = kAccess == Access::Vector ? 1024 / kThreads<T> : 1;

template <class T, Access kAccess>
__global__ __launch_bounds__(kThreads<T>, (kCtasPerSm<T, kAccess>)) void tiles_kernel(
    __grid_constant__ TilesParams const params) {
  Params const& problem = params.problem;
  int band, tile_column, group, tile_row;
  params.tiles_along_k(band, tile_column, static_cast<int>(blockIdx.x));
  params.tiles_along_rows(group, tile_row, band);
  int const rows = valid_rows(problem, group);
  if (tile_row * kBlock >= rows) {
    return;
  }
  int const thread = static_cast<int>(threadIdx.x);
  int const first_row = tile_row * kBlock + thread / kRowThreads<T>;
  int const column = tile_column * kBlock + thread % kRowThreads<T> * Vector<T>::kElems;
  int const left = problem.k - column;
  Vector<T> vectors[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    int const row = first_row + step * kRowsAtATime;
    vectors[step] = load<T, kAccess>(x_row<T>(problem, group, row) + column, row < rows ? left : 0);
  }
  float largest = 0.0f;
#pragma unroll
  for (Vector<T> const& vector : vectors) {
    largest = fmaxf(largest, largest_of(vector));
  }
  constexpr int kWarps = kThreads<T> / kWarp;
  __shared__ float of_warps[kWarps];
  largest = largest_of_lanes<kWarp>(largest);
  if (thread % kWarp == 0) {
    of_warps[thread / kWarp] = largest;
  }
  __syncthreads();
  largest = largest_of_lanes<kWarps>(of_warps[thread % kWarps]);

  float const scale = scale_of(largest, problem.power_of_two);
  Divisor const divisor(scale);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    int const row = first_row + step * kRowsAtATime;
    auto const quantized = quantize<T, Values::OfTheScale>(vectors[step], divisor);
    store<T, kAccess>(quantized, q_row(problem, group, row) + column, row < rows ? left : 0);
  }
  if (thread == 0) {
    scale_at(problem, group, tile_row, tile_column) = scale;
  }
}

}  // namespace

void quantize_tiles(Params const& params, cudaStream_t stream) {
  int const along_k = (params.k + kBlock - 1) / kBlock;
  int const along_rows = (params.rows + kBlock - 1) / kBlock;
  TilesParams const kernel_params{.problem = params,
                                  .tiles_along_k = cutlass::FastDivmod(along_k),
                                  .tiles_along_rows = cutlass::FastDivmod(along_rows)};
  dispatch(params, [&]<class T, Access kAccess>() {
    int const grid = params.groups * along_rows * along_k;
    tiles_kernel<T, kAccess><<<grid, kThreads<T>, 0, stream>>>(kernel_params);
  });
  check_cuda(cudaGetLastError(), "launching tiles_kernel");
}

}  // namespace moe_ext::quantize
