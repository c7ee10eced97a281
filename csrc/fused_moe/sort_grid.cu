// Any number of slots in three launches: counts of each tile, sums over the tiles, rows. Scratch has a row of counts
// for each bin, (bins, tiles), and the sums of the rows behind them, (bins,).
#include "fused_moe/sort_launch.hpp"
#include "fused_moe/sort_tiles.cuh"

namespace moe_ext::fused_moe {
namespace {

constexpr int kSumThreads = 256;

/// scratch[bin][tile] = the tile's slots of the bin. Integers may be added in any order.
template <int kItems>
__global__ __launch_bounds__(kMaxSortThreads) void count_tiles_kernel(
    __grid_constant__ SortKernelParams const params) {
  extern __shared__ int counts[];
  int const thread = static_cast<int>(threadIdx.x);
  int const threads = static_cast<int>(blockDim.x);
  for (int bin = thread; bin < params.bins; bin += threads) {
    counts[bin] = 0;
  }
  __syncthreads();
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  int const tile = static_cast<int>(blockIdx.x);
  int bins[kItems];
  load_bins(params, first_slot_of_thread<kItems>(tile), bins);
#pragma unroll
  for (int const bin : bins) {
    atomicAdd(&counts[bin], 1);
  }
  __syncthreads();
  for (int bin = thread; bin < params.bins; bin += threads) {
    tile_counts(params, bin)[tile] = counts[bin];
  }
}

/// A warp for each bin: counts become sums over the tiles before, the last sum goes to the bin's total.
__global__ __launch_bounds__(kSumThreads) void sum_tiles_kernel(
    __grid_constant__ SortKernelParams const params) {
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int const bin = static_cast<int>(blockIdx.x * kSumThreads + threadIdx.x) / kWarp;
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  if (bin >= params.bins) {
    return;
  }
  int* const counts = tile_counts(params, bin);
  int total = 0;
  int next = lane < params.tiles ? counts[lane] : 0;
  for (int first = 0; first < params.tiles; first += kWarp) {
    int const tile = first + lane;
    int const count = next;
    next = tile + kWarp < params.tiles ? counts[tile + kWarp] : 0;
    int sum = count;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      int const other = __shfl_up_sync(kAllLanes, sum, distance);
      sum += lane >= distance ? other : 0;
    }
    if (tile < params.tiles) {
      counts[tile] = total + sum - count;
    }
    total += __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
  if (lane == 0) {
    bin_totals(params)[bin] = total;
  }
}

template <int kItems>
void launch(SortKernelParams const& params, SortPlan const& plan, cudaStream_t stream) {
  LaunchShape const count{.grid = static_cast<unsigned>(plan.tiles),
                          .threads = static_cast<unsigned>(plan.threads),
                          .cluster = 1,
                          .shared_bytes = params.bins * 4,
                          .programmatic = params.problem.programmatic};
  launch_kernel(&count_tiles_kernel<kItems>, count, stream, params);
  LaunchShape const sum{.grid = static_cast<unsigned>(ceil_div(params.bins, kSumThreads / kWarp)),
                        .threads = kSumThreads,
                        .cluster = 1,
                        .shared_bytes = 0,
                        .programmatic = true};
  launch_kernel(&sum_tiles_kernel, sum, stream, params);
  launch_sort_tiles<OtherTiles::Global, kItems>(params, plan, stream);
}

}  // namespace

void sort_in_three_launches(SortKernelParams const& params, SortPlan const& plan, cudaStream_t stream) {
  if (plan.items == kMaxItems) {
    return launch<kMaxItems>(params, plan, stream);
  }
  launch<4>(params, plan, stream);
}

}  // namespace moe_ext::fused_moe
