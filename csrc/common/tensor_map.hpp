// TMA descriptors, encoded on the host for each launch.
#pragma once

#include <cstdint>

#include <cuda.h>

namespace moe_ext {

/// One dimension of a tensor as TMA walks it, innermost first.
struct TensorMapDim {
  std::uint64_t size;          // elements
  std::uint64_t stride_bytes;  // from one index to the next; ignored for the innermost, which is dense
  std::uint32_t box;           // elements loaded at a time
};

/// How a box lies in shared memory: 16-byte pieces of a 128-byte row permuted by the row's number, or as in memory.
enum class Swizzle { Bytes128, None };

/// How much L2 fetches from memory for a miss.
enum class L2Fetch { Bytes128, Bytes256 };

/// A descriptor for loads with zeros outside the tensor.
template <int kRank>
CUtensorMap make_tensor_map(CUtensorMapDataType type,
                            void const* base,
                            TensorMapDim const (&dims)[kRank],
                            L2Fetch l2_fetch = L2Fetch::Bytes256,
                            Swizzle swizzle = Swizzle::Bytes128);

extern template CUtensorMap make_tensor_map<2>(
    CUtensorMapDataType, void const*, TensorMapDim const (&)[2], L2Fetch, Swizzle);
extern template CUtensorMap make_tensor_map<3>(
    CUtensorMapDataType, void const*, TensorMapDim const (&)[3], L2Fetch, Swizzle);
extern template CUtensorMap make_tensor_map<5>(
    CUtensorMapDataType, void const*, TensorMapDim const (&)[5], L2Fetch, Swizzle);

}  // namespace moe_ext
