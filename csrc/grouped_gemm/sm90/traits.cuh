// Types and compile-time sizes that follow from a row of configs.def.
#pragma once

#include <type_traits>

#include <cute/arch/mma_sm90.hpp>
#include <cute/numeric/numeric_types.hpp>

#include "grouped_gemm/tiling.hpp"

namespace moe_ext::grouped_gemm {

inline constexpr unsigned kFullWarp = 0xffffffffu;

/// First of the two rows of a 64-row block that `thread` of a warp group holds accumulators of; the other is 8 below.
__device__ inline int accumulator_row(int thread) {
  return thread / 32 * 16 + thread % 32 / 4;
}

/// First of the two neighbouring columns of every 8 that it holds.
__device__ inline int accumulator_column(int thread) {
  return thread % 4 * 2;
}

template <class ConfigTag>
struct Traits {
  static constexpr Config kConfig = ConfigTag::value;
  static constexpr bool kSwapped = is_swapped(kConfig.order);
  /// Whether a tile's rows are 8 of gate, 8 of up and so on (WeightRows), which a launch may take any rows for.
  static constexpr bool kGated = kConfig.output != Output::Rows;
  static constexpr bool kWholeRows = kConfig.order == OperandOrder::SwapABRows;
  static constexpr bool kGathers = gathers_tokens(kConfig);  // where a launch asks for it
  static constexpr bool kGathersScales = gathers_scales(kConfig);
  using Element = std::conditional_t<kConfig.dtype == Dtype::BF16, cute::bfloat16_t, cute::float_e4m3_t>;

  static constexpr bool kShifted = kConfig.accumulate == Accumulate::Shifted;
  static constexpr bool kRegisterWeights = kShifted || kWholeRows;  // as WGMMA's M operand
  static constexpr bool kBlockScaled = is_block_scaled(kConfig.accumulate);
  /// Swap-AB: token scales run along N, too many for registers; a warp of its own brings them through the ring.
  static constexpr bool kScalesInRing = kBlockScaled && kSwapped;
  /// In plain order a thread needs few, and reads them itself.
  static constexpr bool kScalesAhead = kBlockScaled && !kSwapped;
  static constexpr bool kPromoted = kBlockScaled || kConfig.accumulate == Accumulate::Promoted;

  static constexpr int kAtomK = kAtomBytes / static_cast<int>(sizeof(Element));  // elements
  static constexpr int kAtomsK = kConfig.tile_k_bytes / kAtomBytes;              // per stage
  static constexpr int kPartsK = kShifted ? 2 : 1;  // sums of an atom with weight scales of their own
  static constexpr int kTileM = kSwapped ? kConfig.tile_weights : kConfig.tile_tokens;
  static constexpr int kMaxTileN = kSwapped ? kConfig.tile_tokens : kConfig.tile_weights;
  static constexpr int kBlockM = 64;                                             // WGMMA's M
  static constexpr int kBlocksM = kTileM / (kBlockM * kConfig.mma_warp_groups);  // per warp group

  static constexpr int kMmaThreads = 128 * kConfig.mma_warp_groups;
  static constexpr int kThreads = 128 + kMmaThreads;

  // One warp of the load warp group works, two with block scales; they need few registers, and what they give up
  // the mma warp groups take. The register file holds 64 Ki words; the launch hands every thread the same share.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * kConfig.ctas_per_sm) / 8 * 8;
  static constexpr bool kTight =
      kConfig.mma_warp_groups == 3 || (kConfig.mma_warp_groups == 1 && kBlocksM * kMaxTileN >= 256);
  static constexpr int kLoadRegisters =
      kScalesInRing ? (kConfig.ctas_per_sm > 1 && kConfig.mma_warp_groups > 1 ? 64 : 72)
                    : (takes_list(kConfig) ? 56 : (kTight ? 32 : 40));
  static constexpr int kMmaRegistersFit =
      (kLaunchRegisters * kThreads - kLoadRegisters * 128) / kMmaThreads / 8 * 8;
  static constexpr int kMmaRegisters = kMmaRegistersFit < 240 ? kMmaRegistersFit : 240;

  // Promotion needs a second accumulator. Beside a 256-column main one only 128 columns fit.
  static constexpr int kMaxInstructionN = !kPromoted                                       ? 256
                                          : (kBlockScaled && !kSwapped) || kMaxTileN > 192 ? 128
                                                                                           : 192;

  static_assert(kTileM % (kBlockM * kConfig.mma_warp_groups) == 0,
                "each mma warp group takes whole 64-row blocks");
  static_assert(kConfig.tile_weights <= 256 && kConfig.tile_tokens <= 256, "a TMA box has at most 256 rows");
  static_assert(kConfig.tile_k_bytes % kAtomBytes == 0, "a stage is whole swizzle atoms of K");
  static_assert(kSwapped || !kShifted, "weights are masked in registers, as WGMMA's M operand");
  static_assert(!kWholeRows || (kPromoted && !kShifted && kConfig.split_k == 1),
                "whole rows are for promoted FP8 or block scales that begin with K");
  static_assert(kSwapped || kConfig.tile_tokens % 8 == 0, "a TMA box is whole swizzle atoms");
  static_assert((kConfig.dtype == Dtype::BF16) == (kConfig.accumulate == Accumulate::FP32),
                "BF16 accumulates in fp32; FP8 is promoted, fast or block-scaled");
};

}  // namespace moe_ext::grouped_gemm
