// The sort of up to 128 slots.
#include "common/launch.hpp"
#include "fused_moe/sort_few.cuh"
#include "fused_moe/sort_launch.hpp"

namespace moe_ext::fused_moe {
namespace {

template <int kItems>
__global__ __launch_bounds__(kFewThreads) void sort_few_kernel(
    __grid_constant__ SortKernelParams const params) {
  sort_few_slots<kItems>(params, static_cast<int>(blockIdx.x));
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
