// What all kernels of the sort take, made once on the host.
#pragma once

#include "fused_moe/sort.hpp"
#include "fused_moe/sort_plan.hpp"

namespace moe_ext::fused_moe {

struct SortKernelParams {
  SortParams problem;
  ExpertIds ids;
  int bins;   // sort_bins(...)
  int tiles;  // CTAs that share the slots
};

}  // namespace moe_ext::fused_moe
