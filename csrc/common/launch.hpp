// The only cudaLaunchKernelEx: shared memory, cluster and programmatic dependence, checked.
#pragma once

#include <cuda_runtime.h>

#include "common/check.hpp"

namespace moe_ext {

struct LaunchShape {
  unsigned grid;
  unsigned threads;
  unsigned cluster;
  int shared_bytes;
  bool programmatic;  // may begin before the previous kernel in the stream has ended
};

template <class KernelParams>
void launch_kernel(void (*kernel)(KernelParams),
                   LaunchShape const& shape,
                   cudaStream_t stream,
                   KernelParams const& params) {
  // Per device and context; asking again is cheap, and remembering would need mutable state.
  check_cuda(cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  shape.shared_bytes),
             "cudaFuncSetAttribute");
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {shape.cluster, 1, 1};
  }
  if (shape.programmatic) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.grid);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), "kernel launch");
}

}  // namespace moe_ext
