// What every compiled kernel exports; no torch and no CuTe in sight.
#pragma once

#include <cuda_runtime_api.h>

#include "grouped_gemm/config.hpp"
#include "grouped_gemm/params.hpp"

namespace moe_ext::grouped_gemm {

/// Enqueues the kernel of `ConfigTag` on `stream`. Throws std::runtime_error if the driver refuses.
template <class ConfigTag>
void launch(Params const& params, cudaStream_t stream);

/// Says of the kernel what must be said once on each device; `launch` does it where it has not been done. `device` is
/// the current one.
template <class ConfigTag>
void prepare(int device);

}  // namespace moe_ext::grouped_gemm
