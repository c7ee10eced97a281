// A row in the registers of as many warps as it takes, up to 1024 threads.
#pragma once

#include <algorithm>

#include "common/launch.hpp"
#include "common/math.hpp"
#include "fused_moe/gather_rows.cuh"

namespace moe_ext::fused_moe::gather {

inline constexpr int kMaxRowThreads = 1024;
inline constexpr int kRowVectors = 4;  // of a thread, loaded before the first is used
// Short rows share a CTA, as many as there are warps in this.
inline constexpr int kPreferredRowThreads = 256;

// With fewer rows than this, less than two an SM, more threads share a row: a vector each.
inline constexpr int kFewRows = 264;

inline bool has_few_rows(GatherParams const& params) {
  return params.max_rows < kFewRows && params.hidden_size <= RowVector::kElems * kMaxRowThreads;
}

struct RowParams {
  RowSource source;
  int threads_per_row;  // whole warps; more than one only where a row has a CTA for itself
};

/// A thread's vectors of one part of the row, `step` columns apart; none from column `end` on.
template <int kVectors>
__device__ void load_part(
    RowSource const& source, Row const& row, int column, int step, int end, RowVector (&vectors)[kVectors]) {
  int const left = end - column;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    vectors[i] = load_row_vector(row.x + column + i * step, left - i * step);
  }
  if (source.problem.weights_type != GatherWeights::None) {
#pragma unroll
    for (RowVector& vector : vectors) {
      apply_weight(vector, row.weight);
    }
  }
}

/// The largest over the threads of a row, in all of them.
__device__ inline float largest_of_row(float largest, int threads_per_row) {
  largest = quantize::largest_of_lanes<kWarp>(largest);
  if (threads_per_row == kWarp) {
    return largest;
  }
  __shared__ float of_warps[kMaxRowThreads / kWarp];
  if (threadIdx.x % kWarp == 0) {
    of_warps[threadIdx.x / kWarp] = largest;
  }
  __syncthreads();
  unsigned const lane = threadIdx.x % kWarp;
  return quantize::largest_of_lanes<kWarp>(lane < blockDim.x / kWarp ? of_warps[lane] : 0.0f);
}

/// Threads of a row that has `vectors` a thread.
inline int threads_per_row(GatherParams const& params, int vectors) {
  int const columns = RowVector::kElems * vectors * kWarp;  // of a warp
  std::int64_t const warps = ceil_div(params.hidden_size, columns);
  return static_cast<int>(std::min<std::int64_t>(warps, kMaxRowThreads / kWarp)) * kWarp;
}

inline LaunchShape row_shape(GatherParams const& params, int threads) {
  int const rows = threads == kWarp ? kPreferredRowThreads / kWarp : 1;
  return {.grid = static_cast<unsigned>(ceil_div(params.max_rows, rows)),
          .threads = static_cast<unsigned>(threads * rows),
          .cluster = 1,
          .shared_bytes = 0,
          .programmatic = params.programmatic};
}

template <int kVectors>
void launch_rows(void (*kernel)(RowParams), GatherParams const& params, cudaStream_t stream) {
  int const threads = threads_per_row(params, kVectors);
  RowParams const kernel_params{.source = make_row_source(params), .threads_per_row = threads};
  launch_kernel(kernel, row_shape(params, threads), stream, kernel_params);
}

}  // namespace moe_ext::fused_moe::gather
