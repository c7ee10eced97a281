// All named-barrier ids of the kernel; 0 is __syncthreads.
#pragma once

namespace moe_ext::grouped_gemm {

enum class NamedBarrier : unsigned {
  kStagger = 1,  // the first mma warp group lets the second one begin its tile
  kStaging = 2,  // one per mma warp group, kStaging + warp group: its staging buffer is full, or free again
};

}  // namespace moe_ext::grouped_gemm
