// The four ways to quantise, one for each granularity. None has work to do for an empty tensor.
#pragma once

#include <cuda_runtime_api.h>

#include "quantize/params.hpp"

namespace moe_ext::quantize {

/// One scale for each group: static, or found by a first kernel.
void quantize_tensor(Params const& params, cudaStream_t stream);

/// One scale for each row.
void quantize_rows(Params const& params, cudaStream_t stream);

/// One scale for each 128 values of a row.
void quantize_row_blocks(Params const& params, cudaStream_t stream);

/// One scale for each 128 x 128 values.
void quantize_tiles(Params const& params, cudaStream_t stream);

}  // namespace moe_ext::quantize
