// The only cudaLaunchKernelEx: shared memory, cluster and programmatic dependence, checked.
#pragma once

#include <atomic>
#include <cstdint>

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

/// Allows a kernel its shared memory on the current device.
inline void allow_shared_memory(void const* kernel, int bytes) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "cudaFuncSetAttribute");
}

template <class KernelParams>
void enqueue_kernel(void (*kernel)(KernelParams),
                    LaunchShape const& shape,
                    cudaStream_t stream,
                    KernelParams const& params) {
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

/// The devices on which a kernel has been allowed its shared memory, a bit each. Remembered, because saying it again
/// costs each launch half a microsecond; atomic, because it is only ever set, to what is true by then.
using AllowedDevices = std::atomic<std::uint64_t>;

/// For launches by `enqueue_kernel`. `kernel` always comes with the same `bytes` and `allowed`; `device` is the current
/// one.
template <class KernelParams>
void allow_shared_memory_once(void (*kernel)(KernelParams), int bytes, int device, AllowedDevices& allowed) {
  // Devices past the last bit have none and are told each time.
  std::uint64_t const bit = device < 64 ? std::uint64_t{1} << device : 0;
  if ((allowed.load(std::memory_order_acquire) & bit) == 0) [[unlikely]] {
    allow_shared_memory(reinterpret_cast<void const*>(kernel), bytes);
    allowed.fetch_or(bit, std::memory_order_release);
  }
}

/// For a kernel whose shared memory depends on the problem and is seldom more than every kernel has.
template <class KernelParams>
void launch_kernel(void (*kernel)(KernelParams),
                   LaunchShape const& shape,
                   cudaStream_t stream,
                   KernelParams const& params) {
  constexpr int kEveryKernelHas = 48 * 1024;
  if (shape.shared_bytes > kEveryKernelHas) [[unlikely]] {
    allow_shared_memory(reinterpret_cast<void const*>(kernel), shape.shared_bytes);
  }
  enqueue_kernel(kernel, shape, stream, params);
}

}  // namespace moe_ext
