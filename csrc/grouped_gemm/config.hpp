// What a compiled kernel is: the fields of one row of configs.def, as values.
#pragma once

#include <string_view>

namespace moe_ext::grouped_gemm {

/// Which operand sits on the M side of WGMMA.
enum class OperandOrder {
  SwapAB,  ///< weights on M, tokens on N: tokens are padded to 8, not to 64
  Plain,   ///< tokens on M, weights on N
};

enum class Dtype { BF16, FP8 };

/// How products over K are summed.
enum class Accumulate {
  FP32,      ///< BF16 operands: the tensor core's fp32 accumulator
  Promoted,  ///< FP8: tensor-core sums over at most 128 of K are added into fp32 registers
  Fast,      ///< FP8: the tensor core's accumulator (about 14 bits of mantissa) over all of K
};

struct Config {
  std::string_view id;
  OperandOrder order;
  Dtype dtype;
  Accumulate accumulate;
  int tile_weights;     // rows of b[group] (the n dimension) in one CTA's tile
  int tile_tokens;      // rows of a in one CTA's tile, at most
  int stages;           // depth of the shared-memory ring; one stage is 128 bytes of K
  int mma_warp_groups;  // warp groups that issue WGMMA
  int cluster;          // CTAs that share one token tile by TMA multicast, each with its own weight tile
  int ctas_per_sm;      // co-resident CTAs the register and shared-memory budgets are cut for
};

/// Bytes of K in one stage: one 128-byte swizzle atom, so that a row of a tile is one line.
inline constexpr int kTileKBytes = 128;

}  // namespace moe_ext::grouped_gemm

/// A row of configs.def: defines the tag type `configs::<id>` that names the kernel's template instance.
#define MOE_EXT_CONFIG(                                                                                      \
    id_, order_, dtype_, accumulate_, tile_weights_, tile_tokens_, stages_, warp_groups_, cluster_, ctas_)   \
  namespace moe_ext::grouped_gemm::configs {                                                                 \
  struct id_ {                                                                                               \
    static constexpr Config value{                                                                           \
        #id_,          OperandOrder::order_, Dtype::dtype_, Accumulate::accumulate_, tile_weights_,           \
        tile_tokens_, stages_,              warp_groups_,  cluster_,                ctas_};                   \
  };                                                                                                         \
  }
