// An empty sum: k = 0 gives zeros, or the bias, in the rows that belong to a group.
#pragma once

#include <cuda_runtime_api.h>

#include "grouped_gemm/params.hpp"

namespace moe_ext::grouped_gemm {

/// Writes the rows of `out` that belong to a group; TMA cannot describe operands without columns.
void empty_sum(Params const& params, cudaStream_t stream);

}  // namespace moe_ext::grouped_gemm
