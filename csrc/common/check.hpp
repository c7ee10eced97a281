// What a user got wrong is a ValueError in Python, what CUDA refuses a RuntimeError.
#pragma once

#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

#include <cuda_runtime_api.h>

namespace moe_ext {

/// The parts of a message, streamed into one string.
template <class... Parts>
std::string concat(Parts const&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

/// Throws std::invalid_argument, which reaches Python as ValueError with the bare message.
template <class... Parts>
[[noreturn]] void fail_value(Parts const&... parts) {
  throw std::invalid_argument(concat(parts...));
}

/// The same unless `condition` holds; for parts that cost nothing to name.
template <class... Parts>
void check_value(bool condition, Parts const&... parts) {
  if (!condition) [[unlikely]] {
    fail_value(parts...);
  }
}

/// Throws std::runtime_error naming the call that CUDA refused.
inline void check_cuda(cudaError_t status, char const* what) {
  if (status != cudaSuccess) [[unlikely]] {
    throw std::runtime_error(concat("moe_ext: ", what, " failed: ", cudaGetErrorString(status)));
  }
}

/// A size that the device code holds in 32 bits.
inline int narrow(std::int64_t value, char const* what) {
  check_value(value >= 0 && value <= std::numeric_limits<int>::max(),
              "grouped_gemm: ",
              what,
              " must be in [0, 2^31), got ",
              value);
  return static_cast<int>(value);
}

}  // namespace moe_ext
