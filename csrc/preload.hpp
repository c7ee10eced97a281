// The C++ side of moe_ext.preload: every kernel of this library into a device's context.
#pragma once

#include <cstdint>

namespace moe_ext {

/// Loads every kernel into the context of `device` and says of each what its first launch would say, so that no later
/// launch does. Returns how many there are. Not for a thread that is capturing a CUDA graph.
std::int64_t preload_kernels(std::int64_t device);

}  // namespace moe_ext
