// One scale for each row: a row lies in the registers of as many warps as it takes, up to 1024 threads.
#include <algorithm>

#include "common/launch.hpp"
#include "common/math.hpp"
#include "fused_moe/gather_launch.hpp"
#include "fused_moe/gather_rows.cuh"

namespace moe_ext::fused_moe::gather {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kWarp = 32;
constexpr int kManyVectors = 4;  // of a thread, loaded before the first is used
// Short rows share a CTA, as many as there are warps in this.
constexpr int kPreferredThreads = 256;
// With fewer rows than this, less than two an SM, more threads share a row: a vector each.
constexpr int kFewRows = 264;

struct RowScaleParams {
  RowSource source;
  int threads_per_row;  // whole warps; more than one only where a row has a CTA for itself
};

/// A thread's vectors of one part of the row, `step` columns apart.
template <int kVectors>
__device__ void load_part(
    RowSource const& source, Row const& row, int column, int step, RowVector (&vectors)[kVectors]) {
  int const left = source.problem.hidden_size - column;
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

template <int kVectors>
__device__ float largest_of_part(RowVector const (&vectors)[kVectors]) {
  float largest = 0.0f;
#pragma unroll
  for (RowVector const& vector : vectors) {
    largest = fmaxf(largest, quantize::largest_of(vector));
  }
  return largest;
}

/// The largest over the threads of a row, in all of them.
__device__ float largest_of_row(float largest, int threads_per_row) {
  largest = quantize::largest_of_lanes<kWarp>(largest);
  if (threads_per_row == kWarp) {
    return largest;
  }
  __shared__ float of_warps[kMaxThreads / kWarp];
  if (threadIdx.x % kWarp == 0) {
    of_warps[threadIdx.x / kWarp] = largest;
  }
  __syncthreads();
  unsigned const lane = threadIdx.x % kWarp;
  return quantize::largest_of_lanes<kWarp>(lane < blockDim.x / kWarp ? of_warps[lane] : 0.0f);
}

template <int kVectors>
__global__ __launch_bounds__(kMaxThreads) void gather_row_scales_kernel(
    __grid_constant__ RowScaleParams const params) {
  wait_for_previous_kernel();
  GatherParams const& problem = params.source.problem;
  int const threads = params.threads_per_row;
  int const thread = static_cast<int>(threadIdx.x) % threads;
  int const in_cta = static_cast<int>(threadIdx.x) / threads;
  int const index = static_cast<int>(blockIdx.x) * (static_cast<int>(blockDim.x) / threads) + in_cta;
  Row const row = find_row(params.source, index);
  // The same for all threads of the row, so for all that meet below.
  if (row.x == nullptr) {
    return;
  }
  int const column = thread * RowVector::kElems;
  int const step = threads * RowVector::kElems;
  int const part = step * kVectors;
  RowVector vectors[kVectors];
  load_part(params.source, row, column, step, vectors);
  float largest = largest_of_part(vectors);
  if (part < problem.hidden_size) {
    for (int first = part; first < problem.hidden_size; first += part) {
      load_part(params.source, row, first + column, step, vectors);
      largest = fmaxf(largest, largest_of_part(vectors));
    }
    // Back to the first part, with which the loop below begins.
    load_part(params.source, row, column, step, vectors);
  }
  float const scale = quantize::scale_of(largest_of_row(largest, threads), false);
  quantize::Divisor const divisor(scale);
  std::uint8_t* const out = fp8_row(problem, index);
  for (int first = 0; first < problem.hidden_size; first += part) {
    if (first > 0) {
      load_part(params.source, row, first + column, step, vectors);
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

template <int kVectors>
void launch(GatherParams const& params, cudaStream_t stream) {
  constexpr int kColumns = RowVector::kElems * kVectors * kWarp;  // of a warp
  int const warps =
      static_cast<int>(std::min<std::int64_t>(ceil_div(params.hidden_size, kColumns), kMaxThreads / kWarp));
  int const threads = warps * kWarp;
  int const rows = warps == 1 ? kPreferredThreads / kWarp : 1;
  RowScaleParams const kernel_params{.source = make_row_source(params), .threads_per_row = threads};
  LaunchShape const shape{.grid = static_cast<unsigned>(ceil_div(params.max_rows, rows)),
                          .threads = static_cast<unsigned>(threads * rows),
                          .cluster = 1,
                          .shared_bytes = 0,
                          .programmatic = params.programmatic};
  launch_kernel(gather_row_scales_kernel<kVectors>, shape, stream, kernel_params);
}

}  // namespace

void by_rows(GatherParams const& params, cudaStream_t stream) {
  bool const few = params.max_rows < kFewRows && params.hidden_size <= RowVector::kElems * kMaxThreads;
  few ? launch<1>(params, stream) : launch<kManyVectors>(params, stream);
}

}  // namespace moe_ext::fused_moe::gather
