// What a compiled kernel is: the fields of one row of configs.def, as values.
#pragma once

#include <string_view>

namespace moe_ext::grouped_gemm {

/// Which operand sits on the M side of WGMMA.
enum class OperandOrder {
  SwapAB,  ///< weights on M, tokens on N: tokens are padded to 8, not to 64
  /// The same, rows of weights whole in shared memory and through registers into WGMMA. For K of an odd multiple of 16
  /// bytes below 256, where boxes of 128 bytes touch twice the lines of memory (docs/notes/token-traffic.md).
  SwapABRows,
  Plain,  ///< tokens on M, weights on N
};

constexpr bool is_swapped(OperandOrder order) {
  return order != OperandOrder::Plain;
}

enum class Dtype { BF16, FP8 };

/// How products over K are summed.
enum class Accumulate {
  FP32,      ///< BF16 operands: the tensor core's fp32 accumulator
  Promoted,  ///< FP8: tensor-core sums over at most 128 of K are added into fp32 registers
  Fast,      ///< FP8: the tensor core's accumulator (about 14 bits of mantissa) over all of K
  Block,     ///< FP8: promoted, and each sum over 128 of K multiplied by its own two scales
  Shifted,  ///< the same where the weights' scale blocks do not begin at multiples of 128 of K: two sums in each 128
};

/// Whether sums over K meet scales on their way into fp32 registers.
constexpr bool is_block_scaled(Accumulate accumulate) {
  return accumulate == Accumulate::Block || accumulate == Accumulate::Shifted;
}

/// What a kernel makes of its sums.
enum class Output {
  Rows,   ///< stores them: (num_rows, n)
  Gated,  ///< n is gate and up rows: joins them by an activation and stores (num_rows, n / 2), bf16
  Either,  ///< what a launch asks for: one kernel for both GEMMs of a layer, whose code is then not fetched twice
};

struct Config {
  std::string_view id;
  OperandOrder order;
  Dtype dtype;
  Accumulate accumulate;
  Output output;
  int tile_weights;     // rows of b[group] (the n dimension) in one CTA's tile
  int tile_tokens;      // rows of a in one CTA's tile, at most
  int tile_k_bytes;     // bytes of K in one stage of the shared-memory ring
  int stages;           // depth of the ring
  int mma_warp_groups;  // warp groups that issue WGMMA
  int split_k;          // CTAs of a cluster, which share one tile, each with its own part of K
  int ctas_per_sm;      // co-resident CTAs the register and shared-memory budgets are cut for
};

/// Whether a kernel can add a bias. A gated tile in plain order with scales per block has no registers left for it.
constexpr bool takes_bias(Config const& config) {
  return config.output == Output::Rows || config.order != OperandOrder::Plain ||
         !is_block_scaled(config.accumulate);
}

/// Whether a gated kernel can leave its features as FP8 by one scale, which is known before.
constexpr bool quantises_by_one_scale(Config const& config) {
  return config.output != Output::Rows && config.accumulate == Accumulate::Promoted;
}

/// Whether a gated kernel can leave its features as FP8 with a scale for each 128: a tile then has all of these, and a
/// row's sums are with one warp.
constexpr bool quantises_features(Config const& config) {
  return config.output == Output::Gated && config.order == OperandOrder::Plain &&
         is_block_scaled(config.accumulate) && config.tile_weights == 256;
}

/// Whether a kernel is for few tokens.
constexpr bool is_narrow(Config const& config) {
  return config.tile_tokens < 64;
}

/// Whether a kernel can find its tiles by a list of the groups that have rows.
constexpr bool takes_list(Config const& config) {
  return is_narrow(config) && config.output != Output::Rows;
}

/// Whether a kernel can load tokens whose rows lie anywhere, as those of a layer's first GEMM do. Two kinds of promoted
/// kernels would pay for the code even where it does not run: with stages of 256 bytes of K and wide tiles sums and
/// partial sums lose their separate register banks, and three mma warp groups have no registers to give.
constexpr bool gathers_tokens(Config const& config) {
  bool const pays = config.accumulate == Accumulate::Promoted && !is_narrow(config) &&
                    (config.tile_k_bytes > 128 || config.mma_warp_groups == 3);
  return config.output != Output::Rows && !pays;
}

/// Whether the warps that gather bring the scales of tokens too, one for each.
constexpr bool gathers_scales(Config const& config) {
  return gathers_tokens(config) && is_narrow(config) && is_swapped(config.order) &&
         config.accumulate == Accumulate::Promoted;
}

/// Warps of the load warp group that do it.
inline constexpr int kGatherWarps = 2;

/// Bytes of K in one 128-byte swizzle atom: a row of an operand in shared memory.
inline constexpr int kAtomBytes = 128;

/// Rows and columns of a weight block that has a scale of its own, and the part of a row of `a` that has one.
inline constexpr int kScaleBlock = 128;

}  // namespace moe_ext::grouped_gemm

/// A row of configs.def: defines the tag type `configs::<id>` that names the kernel's template instance.
#define MOE_EXT_CONFIG(id_,                                              \
                       order_,                                           \
                       dtype_,                                           \
                       accumulate_,                                      \
                       output_,                                          \
                       tile_weights_,                                    \
                       tile_tokens_,                                     \
                       tile_k_bytes_,                                    \
                       stages_,                                          \
                       mma_warp_groups_,                                 \
                       split_k_,                                         \
                       ctas_per_sm_)                                     \
  namespace moe_ext::grouped_gemm::configs {                             \
  struct id_ {                                                           \
    static constexpr Config value{.id = #id_,                            \
                                  .order = OperandOrder::order_,         \
                                  .dtype = Dtype::dtype_,                \
                                  .accumulate = Accumulate::accumulate_, \
                                  .output = Output::output_,             \
                                  .tile_weights = tile_weights_,         \
                                  .tile_tokens = tile_tokens_,           \
                                  .tile_k_bytes = tile_k_bytes_,         \
                                  .stages = stages_,                     \
                                  .mma_warp_groups = mma_warp_groups_,   \
                                  .split_k = split_k_,                   \
                                  .ctas_per_sm = ctas_per_sm_};          \
  };                                                                     \
  }
