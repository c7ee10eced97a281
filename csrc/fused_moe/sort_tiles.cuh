// The kernel that gives all slots of a tile their rows, once it knows everybody's counts.
#pragma once

#include <cooperative_groups.h>

#include "common/launch.hpp"
#include "fused_moe/sort_tile.cuh"

namespace moe_ext::fused_moe {

/// Where the counts of the other tiles are: there are none, in the shared memory of a cluster, or in global memory.
enum class OtherTiles { None, Cluster, Global };

/// Slots in a pair of bins: of all tiles, and of those before this one.
struct PairCounts {
  int2 all;
  int2 before;
};

/// The scratch of sort_grid.cu.
__device__ inline int* tile_counts(SortKernelParams const& params, int bin) {
  return params.problem.scratch + static_cast<std::int64_t>(bin) * params.tiles;
}

__device__ inline int* bin_totals(SortKernelParams const& params) {
  return tile_counts(params, params.bins);
}

template <OtherTiles kOthers>
__device__ PairCounts count_everywhere(SortKernelParams const& params, int tile, int2* totals, int pair) {
  if constexpr (kOthers == OtherTiles::None) {
    return {.all = totals[pair], .before = {0, 0}};
  } else if constexpr (kOthers == OtherTiles::Global) {
    auto const* const all = reinterpret_cast<int2 const*>(bin_totals(params));
    int const* const first = tile_counts(params, 2 * pair);
    return {.all = all[pair], .before = {first[tile], first[params.tiles + tile]}};
  } else {
    auto const cluster = cooperative_groups::this_cluster();
    int2 counts[kSortClusterCtas];
#pragma unroll
    for (int rank = 0; rank < kSortClusterCtas; ++rank) {
      counts[rank] = *cluster.map_shared_rank(totals + pair, rank);
    }
    PairCounts result{};
#pragma unroll
    for (int rank = 0; rank < kSortClusterCtas; ++rank) {
      result.all.x += counts[rank].x;
      result.all.y += counts[rank].y;
      result.before.x += rank < tile ? counts[rank].x : 0;
      result.before.y += rank < tile ? counts[rank].y : 0;
    }
    return result;
  }
}

/// The row of this tile's first slot of every bin, in `storage.first_row`; and `offs`, from the first tile.
template <OtherTiles kOthers>
__device__ void find_first_rows(SortKernelParams const& params, int tile, TileStorage const& storage) {
  auto* const totals = reinterpret_cast<int2*>(storage.totals);
  auto* const all = reinterpret_cast<int2*>(storage.all);
  auto* const first_row = reinterpret_cast<int2*>(storage.first_row);
  int sum = 0;
  for_own_pairs(params.bins, [&](int pair) {
    PairCounts const counts = count_everywhere<kOthers>(params, tile, totals, pair);
    all[pair] = counts.all;
    first_row[pair] = counts.before;
    sum += counts.all.x + counts.all.y;
  });
  int end = sum_before_thread(sum);
  for_own_pairs(params.bins, [&](int pair) {
    int const bin = 2 * pair;
    int2 const here = all[pair];
    int2 const before = first_row[pair];
    int const middle = end + here.x;
    first_row[pair] = {end + before.x, middle + before.y};
    end = middle + here.y;
    if (tile == 0) {
      int const num_experts = params.problem.num_experts;
      if (bin < num_experts) {
        params.problem.offs[bin] = middle;
      }
      if (bin + 1 < num_experts) {
        params.problem.offs[bin + 1] = end;
      }
    }
  });
}

/// One CTA an SM: asked for more threads, the compiler spills.
template <OtherTiles kOthers, int kItems>
__global__ __launch_bounds__(kMaxSortThreads,
                             1) void sort_tiles_kernel(__grid_constant__ SortKernelParams const params) {
  extern __shared__ uint4 shared[];
  TileStorage const storage(shared, params.bins);
  int const tile = static_cast<int>(blockIdx.x);
  std::uint16_t* const own_counts = storage.counts + threadIdx.x / kWarp * params.bins;
  clear_counts(own_counts, params.bins);

  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  int const first_slot = first_slot_of_thread<kItems>(tile);
  int slots[kItems];
  load_bins(params, first_slot, slots);
  rank_in_warp(slots, params.bits, own_counts);
  __syncthreads();

  for_own_pairs(params.bins, [&](int pair) {
    int2 const totals = sum_over_warps(storage.counts, params.bins, pair);
    reinterpret_cast<int2*>(storage.totals)[pair] = totals;
  });
  if constexpr (kOthers == OtherTiles::Cluster) {
    cooperative_groups::this_cluster().sync();
  }
  find_first_rows<kOthers>(params, tile, storage);
  __syncthreads();
  if constexpr (kOthers == OtherTiles::Cluster) {
    cooperative_groups::this_cluster().barrier_arrive();
  }

#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    int const bin = bin_in(slots[i]);
    int const row = storage.first_row[bin] + own_counts[bin] + rank_in(slots[i]);
    store_row(params, first_slot + i * kWarp, bin, row);
  }
  if constexpr (kOthers == OtherTiles::Cluster) {
    // Shared memory must outlive what the others read of it.
    cooperative_groups::this_cluster().barrier_wait();
  }
}

template <OtherTiles kOthers, int kItems>
void launch_sort_tiles(SortKernelParams const& params, SortPlan const& plan, cudaStream_t stream) {
  bool const in_cluster = kOthers == OtherTiles::Cluster;
  bool const follows_own_kernel = kOthers == OtherTiles::Global;
  LaunchShape const shape{.grid = static_cast<unsigned>(plan.tiles),
                          .threads = static_cast<unsigned>(plan.threads),
                          .cluster = in_cluster ? kSortClusterCtas : 1u,
                          .shared_bytes = sort_shared_bytes(plan.threads, params.problem.num_experts),
                          .programmatic = follows_own_kernel || params.problem.programmatic};
  launch_kernel(&sort_tiles_kernel<kOthers, kItems>, shape, stream, params);
}

}  // namespace moe_ext::fused_moe
