// One scale for each row: a row lies in the registers of as many warps as it takes, up to 1024 threads.
#pragma once

#include "fused_moe/gather_whole_rows.cuh"

namespace moe_ext::fused_moe::gather {

/// The work of CTA `cta`.
template <int kVectors>
__device__ void quantise_rows(RowParams const& params, int cta) {
  RowsAtWork const rows(params.source.problem);
  GatherParams const& problem = params.source.problem;
  int const threads = params.threads_per_row;
  int const thread = static_cast<int>(threadIdx.x) % threads;
  int const in_cta = static_cast<int>(threadIdx.x) / threads;
  int const index = cta * (static_cast<int>(blockDim.x) / threads) + in_cta;
  Row const row = find_row(params.source, index, rows);
  // The same for all threads of the row, so for all that meet below.
  if (row.x == nullptr) {
    return;
  }
  int const column = thread * RowVector::kElems;
  int const step = threads * RowVector::kElems;
  int const part = step * kVectors;
  RowVector vectors[kVectors];
  load_part(params.source, row, column, step, problem.hidden_size, vectors);
  float largest = quantize::largest_of(vectors);
  if (part < problem.hidden_size) {
    for (int first = part; first < problem.hidden_size; first += part) {
      load_part(params.source, row, first + column, step, problem.hidden_size, vectors);
      largest = fmaxf(largest, quantize::largest_of(vectors));
    }
    // Back to the first part, with which the loop below begins.
    load_part(params.source, row, column, step, problem.hidden_size, vectors);
  }
  float const scale = quantize::scale_of(largest_of_row(largest, threads), false);
  quantize::Divisor const divisor(scale);
  std::uint8_t* const out = fp8_row(problem, index);
  for (int first = 0; first < problem.hidden_size; first += part) {
    if (first > 0) {
      load_part(params.source, row, first + column, step, problem.hidden_size, vectors);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      int const own = first + column + i * step;
      auto const values = quantize::quantize<Element, quantize::Values::OfTheScale>(vectors[i], divisor);
      store_fp8(values, out + own, problem.hidden_size - own);
    }
  }
  if (thread == 0) {
    problem.scale[index * problem.scale_row_stride] = scale;
  }
}

}  // namespace moe_ext::fused_moe::gather
