// One scale for each row: a row lies in the registers of as many warps as it takes, up to 1024 threads.
#include <algorithm>

#include "common/check.hpp"
#include "quantize/dispatch.cuh"
#include "quantize/launch.hpp"
#include "quantize/rows.cuh"

namespace moe_ext::quantize {
namespace {

constexpr int kVectors = 4;  // of a thread, loaded before the first is used
constexpr int kMaxThreads = 1024;
constexpr int kWarp = 32;
// Short rows share a CTA, as many as there are warps in this.
constexpr int kPreferredThreads = 256;

/// A thread's vectors from `first` on, a row's threads apart.
template <class T, Access kAccess>
__device__ void load_part(T const* first, int left, Vector<T> (&vectors)[kVectors]) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    int const step = i * static_cast<int>(blockDim.x) * Vector<T>::kElems;
    vectors[i] = load<T, kAccess>(first + step, left - step);
  }
}

/// The largest over the threads of each row, in all of them.
__device__ float largest_of_row(float largest) {
  largest = largest_of_lanes<kWarp>(largest);
  if (blockDim.x == kWarp) {
    return largest;
  }
  // More than a warp: then the row has the CTA for itself.
  __shared__ float of_warps[kMaxThreads / kWarp];
  if (threadIdx.x % kWarp == 0) {
    of_warps[threadIdx.x / kWarp] = largest;
  }
  __syncthreads();
  unsigned const lane = threadIdx.x % kWarp;
  return largest_of_lanes<kWarp>(lane < blockDim.x / kWarp ? of_warps[lane] : 0.0f);
}

/// blockDim = (threads of a row, rows).
template <class T, Access kAccess>
__global__ __launch_bounds__(kMaxThreads) void rows_kernel(__grid_constant__ Params const params) {
  constexpr int kElems = Vector<T>::kElems;
  int const flat_row = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
  int const group = flat_row / params.rows;
  int const row = flat_row - group * params.rows;
  // The same for all threads of the row, so for all that meet below.
  if (group >= params.groups || row >= valid_rows(params, group)) {
    return;
  }
  int const column = static_cast<int>(threadIdx.x) * kElems;
  int const left = params.k - column;
  int const step = static_cast<int>(blockDim.x) * kElems;
  int const part = step * kVectors;
  T const* const in = x_row<T>(params, group, row) + column;
  Vector<T> vectors[kVectors];
  load_part<T, kAccess>(in, left, vectors);
  float largest = largest_of(vectors);
  if (part < params.k) {
    for (int first = part; first < params.k; first += part) {
      load_part<T, kAccess>(in + first, left - first, vectors);
      largest = fmaxf(largest, largest_of(vectors));
    }
    // Back to the first part, with which the loop below begins.
    load_part<T, kAccess>(in, left, vectors);
  }
  float const scale = scale_of(largest_of_row(largest), params.power_of_two);
  Divisor const divisor(scale);
  std::uint8_t* const out = q_row(params, group, row) + column;
  for (int first = 0; first < params.k; first += part) {
    if (first > 0) {
      load_part<T, kAccess>(in + first, left - first, vectors);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      int const offset = first + i * step;
      store<T, kAccess>(quantize<T, Values::OfTheScale>(vectors[i], divisor), out + offset, left - offset);
    }
  }
  if (threadIdx.x == 0) {
    scale_at(params, group, row, 0) = scale;
  }
}

}  // namespace

void quantize_rows(Params const& params, cudaStream_t stream) {
  dispatch(params, [&]<class T, Access kAccess>() {
    std::int64_t const columns = Vector<T>::kElems * kVectors * kWarp;  // of a warp
    std::int64_t const warps =
        std::min<std::int64_t>((params.k + columns - 1) / columns, kMaxThreads / kWarp);
    unsigned const threads = static_cast<unsigned>(warps) * kWarp;
    unsigned const rows = warps == 1 ? kPreferredThreads / kWarp : 1;
    unsigned const all_rows = static_cast<unsigned>(params.groups) * static_cast<unsigned>(params.rows);
    rows_kernel<T, kAccess><<<(all_rows + rows - 1) / rows, dim3(threads, rows), 0, stream>>>(params);
  });
  check_cuda(cudaGetLastError(), "launching rows_kernel");
}

}  // namespace moe_ext::quantize
