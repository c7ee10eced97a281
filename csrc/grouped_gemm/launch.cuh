// From sizes and pointers to a launch: TMA descriptors, grid, kernel.
#pragma once

#include <algorithm>

#include "common/launch.hpp"
#include "common/tensor_map.hpp"
#include "grouped_gemm/launch.hpp"
#include "grouped_gemm/sm90/kernel.cuh"

namespace moe_ext::grouped_gemm {

/// Up to here outputs leave L2 to the weights. 64 tokens of mixtral gate/up (3.7 M) gain nothing by a hint that weights
/// are read once, 128 tokens lose 3 % (docs/notes/l2-hints.md).
inline constexpr std::int64_t kFewOutputs = 1 << 21;

/// Up to here weights are what a launch loads, and come up to 8 % faster where L2 fetches the 128 bytes of a box's row
/// and no more for a miss. With more tokens one of two cards lost 2 % by that (docs/notes/l2-promotion.md).
inline constexpr std::int64_t kFewRowsPerGroup = 16;

template <class ConfigTag>
KernelParams make_kernel_params(Params const& params) {
  using T = Traits<ConfigTag>;
  constexpr Config kConfig = T::kConfig;
  constexpr auto kType =
      kConfig.dtype == Dtype::BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  auto const size = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
  constexpr std::uint32_t kBoxK = T::kAtomK;
  // Whole rows lie in shared memory as they do in memory, without a swizzle: a box may then be twice as long. It is
  // whole pieces of 16 bytes, what is past K zeros.
  constexpr std::int64_t kStageK = T::kAtomK * T::kAtomsK;
  constexpr std::int64_t kPieceK = 16 / static_cast<std::int64_t>(sizeof(typename T::Element));
  auto const row_k = static_cast<std::uint32_t>(std::min(ceil_div(params.k, kPieceK) * kPieceK, kStageK));
  constexpr std::uint32_t kBoxWeights = kConfig.tile_weights;
  std::int64_t const likely_rows = params.expected_rows >= 0 ? params.expected_rows : params.groups.num_rows;
  // How many of a masked tensor's rows count is not known here: seldom many.
  bool const few_rows =
      params.groups.max_rows > 0 || likely_rows <= params.groups.num_groups * kFewRowsPerGroup;
  L2Fetch const l2_fetch = few_rows ? L2Fetch::Bytes128 : L2Fetch::Bytes256;
  KernelParams result{};
  TensorMapDim const weights[] = {{size(params.k), 0, T::kWholeRows ? row_k : kBoxK},
                                  {size(params.n), size(params.b_row_stride_bytes), kBoxWeights},
                                  {size(params.groups.num_groups), size(params.b_group_stride_bytes), 1}};
  if constexpr (T::kGated) {
    auto const step = [&](int rows) { return size(params.b_row_stride_bytes * rows); };
    TensorMapDim const gated[] = {weights[0],
                                  {8, step(params.gating.feature_step), 8},
                                  {2, step(params.gating.up_step), 2},
                                  {size(params.n / 16), step(params.gating.slab_step), kBoxWeights / 16},
                                  weights[2]};
    result.maps.weights = make_tensor_map(kType, params.b, gated, l2_fetch);
  } else {
    result.maps.weights = make_tensor_map(
        kType, params.b, weights, l2_fetch, T::kWholeRows ? Swizzle::None : Swizzle::Bytes128);
  }
  result.row_bytes =
      narrow(static_cast<std::int64_t>(row_k) * static_cast<int>(sizeof(typename T::Element)), "k");
  // No group has more rows than there are, so wider tiles do not come up. Their maps are prefetched all the same: a
  // copy serves, and takes the host less than the 0.1 us of making one.
  int const widest = smallest_width<ConfigTag>(params.groups.num_rows);
  for (int i = 0; i < kNumTokenWidths; ++i) {
    if (params.token_of_row != nullptr) {
      break;  // tokens come another way
    }
    if (i > 0 && token_width(i) > widest) {
      result.maps.tokens[i] = result.maps.tokens[i - 1];
    } else if (has_token_width(kConfig, token_width(i))) {
      auto const width = static_cast<std::uint32_t>(token_width(i));
      TensorMapDim const tokens[] = {{size(params.k), 0, kBoxK},
                                     {size(params.groups.num_rows), size(params.a_row_stride_bytes), width}};
      result.maps.tokens[i] = make_tensor_map(kType, params.a, tokens, l2_fetch);
    }
  }
  if (kConfig.output != Output::Gated && !params.gating.joins && params.out_dtype == OutDtype::BF16) {
    constexpr std::uint32_t kBoxOut = Epilogue<ConfigTag>::kChunk;
    TensorMapDim const out[] = {{size(params.n), 0, kBoxOut},
                                {size(params.groups.num_rows), size(params.out_row_stride * 2), kBoxOut}};
    result.maps.out = make_tensor_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, params.out, out);
  }
  result.epilogue = {.out = params.out,
                     .out_row_stride = params.out_row_stride,
                     .n = narrow(params.n, "n"),
                     .out_dtype = params.out_dtype,
                     .gating = params.gating,
                     .quantised = params.quantised};
  result.groups = params.groups;
  if (params.token_of_row != nullptr) {
    result.gathered = {
        .of_row = params.token_of_row,
        .a = static_cast<unsigned char const*>(params.a),
        .row_pieces = static_cast<unsigned>(narrow(params.a_row_stride_bytes / 16, "row stride")),
        .k_bytes = narrow(params.k * static_cast<int>(sizeof(typename T::Element)), "k")};
  }
  result.scale_a = params.scale_a;
  result.scale_a.token_of_row = params.token_of_row;
  result.scale_b = params.scale_b;
  result.bias = params.bias;
  result.weight_tiles = count_weight_tiles(kConfig, params.n);
  // K tiles past the end of K are zeros to every CTA that splits it.
  constexpr std::int64_t kStep = std::int64_t{T::kAtomK} * T::kAtomsK * kConfig.split_k;
  result.k_tiles = narrow(ceil_div(params.k, kStep), "k");
  result.k_blocks = narrow(ceil_div(params.k, kScaleBlock), "k");
  result.weight_k_blocks = narrow(ceil_div(params.k + params.scale_b.k_offset, kScaleBlock), "k");
  result.wait = params.wait;
  result.few_outputs = likely_rows * params.n <= kFewOutputs ? 1 : 0;
  return result;
}

template <class ConfigTag>
void prepare(int device) {
  static AllowedDevices allowed{0};
  allow_shared_memory_once(&grouped_gemm_kernel<ConfigTag>, Kernel<ConfigTag>::kSharedBytes, device, allowed);
}

template <class ConfigTag>
void launch(Params const& params, cudaStream_t stream) {
  using T = Traits<ConfigTag>;
  constexpr Config kConfig = T::kConfig;
  std::int64_t const most =
      grid_size(kConfig, params.sm_count, params.groups.num_rows, params.groups.num_groups, params.n);
  std::int64_t const grid =
      std::min(most, resident_clusters(kConfig, params.sm_count) * kConfig.split_k - params.spared_ctas);
  LaunchShape const shape{.grid = static_cast<unsigned>(grid),
                          .threads = T::kThreads,
                          .cluster = static_cast<unsigned>(kConfig.split_k),
                          .shared_bytes = Kernel<ConfigTag>::kSharedBytes,
                          .programmatic = params.wait != Wait::ForAll || params.programmatic};
  prepare<ConfigTag>(params.device);
  enqueue_kernel(&grouped_gemm_kernel<ConfigTag>, shape, stream, make_kernel_params<ConfigTag>(params));
}

}  // namespace moe_ext::grouped_gemm
