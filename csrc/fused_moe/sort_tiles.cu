// One launch: a CTA for up to 512 slots, or a cluster whose CTAs read each other's counts.
#include "fused_moe/sort_launch.hpp"
#include "fused_moe/sort_tiles.cuh"

namespace moe_ext::fused_moe {

void sort_in_one_launch(SortKernelParams const& params, SortPlan const& plan, cudaStream_t stream) {
  if (plan.way == SortWay::Cta) {
    return launch_sort_tiles<OtherTiles::None, 1>(params, plan, stream);
  }
  static_assert(kMaxItems == 8, "the cases below are all numbers of items that a plan may have");
  switch (plan.items) {
    case 1:
      return launch_sort_tiles<OtherTiles::Cluster, 1>(params, plan, stream);
    case 2:
      return launch_sort_tiles<OtherTiles::Cluster, 2>(params, plan, stream);
    case 4:
      return launch_sort_tiles<OtherTiles::Cluster, 4>(params, plan, stream);
    default:
      return launch_sort_tiles<OtherTiles::Cluster, 8>(params, plan, stream);
  }
}

}  // namespace moe_ext::fused_moe
