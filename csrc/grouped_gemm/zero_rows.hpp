// An empty sum: k = 0 gives zeros in the rows that belong to a group.
#pragma once

#include <cuda_runtime_api.h>

#include "grouped_gemm/params.hpp"

namespace moe_ext::grouped_gemm {

/// Writes zeros to the rows of `out` below the last offset; TMA cannot describe operands without columns.
void zero_rows(Params const& params, cudaStream_t stream);

}  // namespace moe_ext::grouped_gemm
