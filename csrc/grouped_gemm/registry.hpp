// The compiled kernels, by index: rows of configs.def in order.
#pragma once

#include <string>
#include <vector>

#include "grouped_gemm/launch.hpp"

namespace moe_ext::grouped_gemm {

using LaunchFunction = void (*)(Params const&, cudaStream_t);
using PrepareFunction = void (*)(int device);

struct RegisteredKernel {
  Config config;
  LaunchFunction launch;
  PrepareFunction prepare;
};

std::vector<RegisteredKernel> const& registered_kernels();

}  // namespace moe_ext::grouped_gemm
