// The largest value of many threads, and the one scale that CTAs' largest values give.
#pragma once

#include "fused_moe/gather_rows.cuh"
#include "quantize/chunks.cuh"

namespace moe_ext::fused_moe::gather {

/// The largest over the CTA, of at most kChunkThreads, in all threads. Once in a kernel.
__device__ inline float largest_of_cta(float largest) {
  __shared__ float of_warps[quantize::kChunkThreads / kWarp];
  largest = quantize::largest_of_lanes<kWarp>(largest);
  if (threadIdx.x % kWarp == 0) {
    of_warps[threadIdx.x / kWarp] = largest;
  }
  __syncthreads();
  unsigned const lane = threadIdx.x % kWarp;
  return quantize::largest_of_lanes<kWarp>(lane < blockDim.x / kWarp ? of_warps[lane] : 0.0f);
}

/// The scale of all rows, from what the kernel before has left in `partials`; all threads of the CTA take part.
__device__ inline float scale_of_partials(GatherParams const& problem, int num_partials) {
  float largest = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < num_partials; i += static_cast<int>(blockDim.x)) {
    largest = fmaxf(largest, problem.partials[i]);
  }
  return quantize::scale_of(largest_of_cta(largest), false);
}

}  // namespace moe_ext::fused_moe::gather
