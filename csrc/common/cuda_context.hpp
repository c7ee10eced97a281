// Torch's current stream and device, through the stable ABI.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "common/check.hpp"

namespace moe_ext {

using DeviceGuard = torch::stable::accelerator::DeviceGuard;

/// The stream torch would launch on; `Stream::id()` of the stable ABI is not a cudaStream_t.
inline cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(device, &stream) != AOTI_TORCH_SUCCESS) [[unlikely]] {
    throw std::runtime_error(concat("moe_ext: torch has no current stream on cuda:", device));
  }
  return static_cast<cudaStream_t>(stream);
}

inline int sm_count(int device) {
  int count = 0;
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  return count;
}

}  // namespace moe_ext
