// Few tokens sorted and quantised by one launch. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "fused_moe/gather.hpp"
#include "fused_moe/sort.hpp"

namespace moe_ext::fused_moe {

/// Whether `sort_and_quantize` takes these rows, beside these slots or alone.
bool can_sort_and_quantize(SortParams const& sort, GatherParams const& rows);
bool can_sort_and_quantize(GatherParams const& rows);

/// sort_tokens and, in CTAs beside it, gather_quantize of rows that are found without the sort: neither waits for the
/// other. `sort` may be null. Both ways it is one kernel, so that a layer's second stage that quantises finds the code
/// of its first.
void sort_and_quantize(SortParams const* sort, GatherParams const& rows, cudaStream_t stream);

}  // namespace moe_ext::fused_moe
