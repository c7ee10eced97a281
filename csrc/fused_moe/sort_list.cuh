// The rows of few slots in pieces, for GEMMs that would else look through the offsets of all groups.
#pragma once

#include "fused_moe/sort_keys.cuh"

namespace moe_ext::fused_moe {

using grouped_gemm::kListedRows;

/// A slot's row among those of its place.
struct PlaceRow {
  int place;  // num_experts and beyond: none
  int row;
  int begin;  // of the place
  int end;
};

/// Called by all threads of the CTA that has all slots, each with one: the first rows of pieces are marked, and counted
/// by everybody.
__device__ inline void list_rows(SortKernelParams const& params, int slot, PlaceRow const& own) {
  __shared__ unsigned marks[kMaxFewSlots / kWarp];  // a bit for each row
  if (threadIdx.x < kMaxFewSlots / kWarp) {
    marks[threadIdx.x] = 0;
  }
  __syncthreads();
  SortParams const& problem = params.problem;
  bool const begins = own.place < problem.num_experts && (own.row - own.begin) % kListedRows == 0;
  if (begins) {
    atomicOr(&marks[own.row / kWarp], 1u << own.row % kWarp);
  }
  __syncthreads();
  int pieces = 0;
  int index = 0;
#pragma unroll
  for (int i = 0; i < kMaxFewSlots / kWarp; ++i) {
    int const before = own.row - i * kWarp;
    unsigned const rows_before = before <= 0 ? 0u : before >= kWarp ? kAllLanes : (1u << before) - 1;
    pieces += __popc(marks[i]);
    index += __popc(marks[i] & rows_before);
  }
  if (slot >= pieces && slot < params.num_slots) {
    problem.listed[slot] = {.group = -1, .begin = 0, .end = 0};
  }
  if (begins) {
    problem.listed[index] = {
        .group = own.place, .begin = own.row, .end = min(own.row + kListedRows, own.end)};
  }
}

}  // namespace moe_ext::fused_moe
