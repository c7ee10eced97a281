// A slot's bin (common/expert_ids.cuh) and its row.
#pragma once

#include "common/expert_ids.cuh"
#include "fused_moe/sort_kernel_params.hpp"

namespace moe_ext::fused_moe {

/// A slot's row, and the other way around. Rows of dropped slots come behind all others, so that they fill up
/// `row_slot`.
__device__ inline void store_row(SortKernelParams const& params, int slot, int bin, int row) {
  if (slot < params.ids.num_slots) {
    bool const here = bin < params.problem.num_experts;
    params.problem.slot_row[slot] = here ? row : -1;
    params.problem.row_slot[row] = here ? slot : -1;
  }
}

}  // namespace moe_ext::fused_moe
