// Integer arithmetic that host and device share.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MOE_EXT_HOST_DEVICE __host__ __device__
#else
#define MOE_EXT_HOST_DEVICE
#endif

namespace moe_ext {

MOE_EXT_HOST_DEVICE constexpr std::int64_t ceil_div(std::int64_t dividend, std::int64_t divisor) {
  return (dividend + divisor - 1) / divisor;
}

}  // namespace moe_ext
