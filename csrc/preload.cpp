// Loads every kernel of this library. CUDA loads a kernel's code when something is first asked of the kernel; unasked,
// that is its first launch.
//
// Which kernels there are is known without a list that somebody could forget to add to: nvcc registers every kernel of
// an object with the CUDA runtime while the library is being loaded, by __cudaRegisterFunction, and the linker's
// --wrap (cmake/cuda_library.cmake) lets those calls pass through here.
#include "preload.hpp"

#include <vector>

#include <cuda_runtime_api.h>

#include "common/check.hpp"
#include "common/cuda_context.hpp"
#include "grouped_gemm/registry.hpp"

namespace moe_ext {
namespace {

/// Every kernel, as the runtime knows it. Complete when the library is loaded, and constant from then on.
std::vector<void const*>& kernels() {
  static std::vector<void const*> list;
  return list;
}

}  // namespace

std::int64_t preload_kernels(std::int64_t device) {
  DeviceGuard const guard(static_cast<torch::stable::accelerator::DeviceIndex>(device));
  for (void const* kernel : kernels()) {
    // Attributes are those of loaded code, so that asking for them loads it.
    cudaFuncAttributes attributes;
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  }
  for (grouped_gemm::RegisteredKernel const& kernel : grouped_gemm::registered_kernels()) {
    kernel.prepare(static_cast<int>(device));
  }
  return static_cast<std::int64_t>(kernels().size());
}

}  // namespace moe_ext

extern "C" {

// As nvcc's crt/host_runtime.h declares it; what is passed on is not looked at.
using RegisterFunction = void(void** fatbin,
                              char const* host_function,
                              char* device_function,
                              char const* device_name,
                              int thread_limit,
                              uint3* tid,
                              uint3* bid,
                              dim3* block_dim,
                              dim3* grid_dim,
                              int* warp_size);

RegisterFunction __real___cudaRegisterFunction;

void __wrap___cudaRegisterFunction(void** fatbin,
                                   char const* host_function,
                                   char* device_function,
                                   char const* device_name,
                                   int thread_limit,
                                   uint3* tid,
                                   uint3* bid,
                                   dim3* block_dim,
                                   dim3* grid_dim,
                                   int* warp_size) {
  moe_ext::kernels().push_back(host_function);
  __real___cudaRegisterFunction(fatbin,
                                host_function,
                                device_function,
                                device_name,
                                thread_limit,
                                tid,
                                bid,
                                block_dim,
                                grid_dim,
                                warp_size);
}

}  // extern "C"
