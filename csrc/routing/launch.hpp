// From parameters to the one kernel of a routing.
#pragma once

#include <cuda_runtime_api.h>

#include "routing/params.hpp"

namespace moe_ext::routing {

/// `params` has at least one token.
void topk_routing(Params const& params, cudaStream_t stream);

}  // namespace moe_ext::routing
