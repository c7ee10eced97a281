// 1 x 128: a team holds one block of a row, or four, and finds the scale of each.
#pragma once

#include "fused_moe/gather_chunks.cuh"

namespace moe_ext::fused_moe::gather {

/// The work of CTA `cta`.
template <int kBlocks>
__device__ void quantise_row_blocks(ChunkParams const& params, int cta) {
  RowsAtWork const rows(params.source.problem);
  GatherParams const& problem = params.source.problem;
  auto const chunk = load_own_chunk<kBlocks>(params, rows, cta);
  // Threads without a row stay for the shuffles.
  float largest[kBlocks];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    largest[i] = quantize::largest_of(chunk.vectors[i]);
  }
  // Each thread finds the scale of one block of its team's; kOwners of them that of the same one.
  constexpr int kOwners = kTeam / kBlocks;
  float own_largest;
  if constexpr (kBlocks == 1) {
    own_largest = quantize::largest_of_lanes<kTeam>(largest[0]);
  } else {
    own_largest = quantize::largest_of_own_block<Element>(largest);
  }
  float const own_scale = quantize::scale_of(own_largest, false);
  float const own_reciprocal = quantize::Divisor::reciprocal_of(own_scale);
  int const in_team = static_cast<int>(threadIdx.x) % kTeam;
  int const block = chunk.index * kBlocks + in_team / kOwners;
  if (chunk.left > 0 && in_team % kOwners == 0 && block * quantize::kBlock < problem.hidden_size) {
    problem.scale[chunk.row * problem.scale_row_stride + block] = own_scale;
  }
  std::uint8_t* const out = fp8_row(problem, chunk.row) + chunk.column;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    quantize::Divisor const divisor(__shfl_sync(0xffffffffu, own_scale, i * kOwners, kTeam),
                                    __shfl_sync(0xffffffffu, own_reciprocal, i * kOwners, kTeam));
    auto const values = quantize::quantize<Element, quantize::Values::OfTheScale>(chunk.vectors[i], divisor);
    store_fp8(values, out + i * quantize::kBlock, chunk.left - i * quantize::kBlock);
  }
}

}  // namespace moe_ext::fused_moe::gather
