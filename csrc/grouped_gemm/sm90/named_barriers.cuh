// All named-barrier ids of the kernel; 0 is __syncthreads.
#pragma once

namespace moe_ext::grouped_gemm {

enum class NamedBarrier : unsigned {
  kStaging = 1,  // one per mma warp group, kStaging + warp group: its staging buffer is full, or free again
};

}  // namespace moe_ext::grouped_gemm
