// The kernels behind gather_quantize. None has work to do for no rows.
#pragma once

#include <cuda_runtime_api.h>

#include "fused_moe/gather.hpp"

namespace moe_ext::fused_moe::gather {

/// A copy, or one static scale.
void plainly(GatherParams const& params, cudaStream_t stream);

/// A scale for each 128 values of a row.
void by_row_blocks(GatherParams const& params, cudaStream_t stream);

/// A scale for each row.
void by_rows(GatherParams const& params, cudaStream_t stream);

/// Any of FP8, in the place of x: out is x's address, with the same bytes between rows.
void in_place(GatherParams const& params, cudaStream_t stream);

/// The same by token: with slot_row, without weights, and with at most kMaxTopK slots of a token.
void tokens_plainly(GatherParams const& params, cudaStream_t stream);
void tokens_by_row_blocks(GatherParams const& params, cudaStream_t stream);
void tokens_by_rows(GatherParams const& params, cudaStream_t stream);

}  // namespace moe_ext::fused_moe::gather
