// What all kernels of the sort take, made once on the host.
#pragma once

#include <cutlass/fast_math.h>

#include "fused_moe/sort.hpp"
#include "fused_moe/sort_plan.hpp"

namespace moe_ext::fused_moe {

struct SortKernelParams {
  SortParams problem;
  cutlass::FastDivmod choices_of_token;
  int num_slots;
  int bins;   // sort_bins(...)
  int bits;   // of a bin's number
  int tiles;  // CTAs that share the slots
};

}  // namespace moe_ext::fused_moe
