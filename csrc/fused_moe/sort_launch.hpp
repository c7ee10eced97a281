// The ways to sort, each for a number of slots (sort_plan.hpp).
#pragma once

#include "fused_moe/sort_kernel_params.hpp"

namespace moe_ext::fused_moe {

SortKernelParams make_sort_kernel_params(SortParams const& params, SortPlan const& plan);

void sort_few(SortKernelParams const& params, SortPlan const& plan, cudaStream_t stream);

/// SortWay::Cta and SortWay::Cluster.
void sort_in_one_launch(SortKernelParams const& params, SortPlan const& plan, cudaStream_t stream);

void sort_in_three_launches(SortKernelParams const& params, SortPlan const& plan, cudaStream_t stream);

}  // namespace moe_ext::fused_moe
