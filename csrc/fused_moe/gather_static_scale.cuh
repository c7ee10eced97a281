// Rows quantised by a scale that is known.
#pragma once

#include "fused_moe/gather_chunks.cuh"

namespace moe_ext::fused_moe::gather {

/// The work of CTA `cta`.
template <int kBlocks>
__device__ void quantise_by_static_scale(ChunkParams const& params, int cta) {
  RowsAtWork const rows(params.source.problem);
  GatherParams const& problem = params.source.problem;
  quantize::Divisor const divisor(*problem.static_scale);
  auto const chunk = load_own_chunk<kBlocks>(params, rows, cta);
  std::uint8_t* const out = fp8_row(problem, chunk.row) + chunk.column;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    auto const values = quantize::quantize<Element, quantize::Values::Any>(chunk.vectors[i], divisor);
    store_fp8(values, out + i * quantize::kBlock, chunk.left - i * quantize::kBlock);
  }
}

}  // namespace moe_ext::fused_moe::gather
