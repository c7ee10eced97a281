// Up to 128 slots: every warp holds all bins and answers 32 questions by counting bits.
#include "common/few_slots.cuh"
#include "common/launch.hpp"
#include "fused_moe/sort_keys.cuh"
#include "fused_moe/sort_launch.hpp"

namespace moe_ext::fused_moe {
namespace {

/// One thread for each expert, which asks for its end row, and then one for each slot.
template <int kItems>
__global__ __launch_bounds__(kFewThreads) void sort_few_kernel(
    __grid_constant__ SortKernelParams const params) {
  int const question = static_cast<int>(blockIdx.x * kFewThreads + threadIdx.x);
  int const num_experts = params.problem.num_experts;
  int const slot = question - num_experts;
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  FewSlots<kItems> const slots(params.ids);
  int const own = slots.bin_at(min(max(slot, 0), kMaxFewSlots - 1));
  int const asked = slot < 0 ? question : own;
  int const place = slots.row_of(slot < 0 ? kMaxFewSlots : slot, asked);
  if (slot < 0) {
    params.problem.offs[question] = place;
  } else {
    store_row(params, slot, asked, place);
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
