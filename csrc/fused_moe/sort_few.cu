// Up to 128 slots: every warp holds all bins and answers 32 questions by counting bits. Nobody waits for anybody.
#include "common/launch.hpp"
#include "fused_moe/sort_keys.cuh"
#include "fused_moe/sort_launch.hpp"

namespace moe_ext::fused_moe {
namespace {

/// Which of the warp's 32 bins are below the asked one, and which are the same: bit `lane` of a mask.
struct Comparison {
  unsigned below = 0;
  unsigned same = kAllLanes;
};

/// Compares from the highest bit on; a vote tells each lane one bit of all bins.
template <int kItems>
__device__ void compare(int const (&bins)[kItems], int asked, int bits, Comparison (&result)[kItems]) {
  for (int bit = bits - 1; bit >= 0; --bit) {
    bool const asked_one = asked >> bit & 1;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      unsigned const ones = __ballot_sync(kAllLanes, bins[i] >> bit & 1);
      if (asked_one) {
        result[i].below |= result[i].same & ~ones;
      }
      result[i].same &= asked_one ? ones : ~ones;
    }
  }
}

/// The bits of those among 32 slots that come before slot `index`, which may be none or all.
__device__ unsigned slots_before(int index) {
  return index <= 0 ? 0u : index >= kWarp ? kAllLanes : (1u << index) - 1;
}

/// One thread for each expert, which asks for its end row, and then one for each slot.
template <int kItems>
__global__ __launch_bounds__(kFewThreads) void sort_few_kernel(
    __grid_constant__ SortKernelParams const params) {
  int const question = static_cast<int>(blockIdx.x * kFewThreads + threadIdx.x);
  int const num_experts = params.problem.num_experts;
  int const slot = question - num_experts;
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  int bins[kItems];
  load_bins(params, static_cast<int>(threadIdx.x % kWarp), bins);
  int asked[1] = {question};
  if (slot >= 0) {
    load_bins(params, slot, asked);
  }
  Comparison comparisons[kItems];
  compare(bins, asked[0], params.bits, comparisons);
  int end = 0;
  int row = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    auto const [below, same] = comparisons[i];
    end += __popc(below | same);
    row += __popc(below | (same & slots_before(slot - i * kWarp)));
  }
  if (slot < 0) {
    params.problem.offs[question] = end;
  } else {
    store_row(params, slot, asked[0], row);
  }
}

}  // namespace

void sort_few(SortKernelParams const& params, SortPlan const& plan, cudaStream_t stream) {
  LaunchShape const shape{.grid = static_cast<unsigned>(plan.tiles),
                          .threads = kFewThreads,
                          .cluster = 1,
                          .shared_bytes = 0,
                          .programmatic = params.problem.programmatic};
  if (plan.items == 1) {
    launch_kernel(&sort_few_kernel<1>, shape, stream, params);
  } else {
    launch_kernel(&sort_few_kernel<kMaxFewSlots / kWarp>, shape, stream, params);
  }
}

}  // namespace moe_ext::fused_moe
