// The group's bias, added to finished sums.
#pragma once

#include <cuda_bf16.h>

#include "grouped_gemm/params.hpp"
#include "grouped_gemm/sm90/epilogue_of.cuh"
#include "grouped_gemm/sm90/weight_rows.cuh"

namespace moe_ext::grouped_gemm {

__device__ inline float read_bias(Bias const& bias, int group, int weight) {
  std::int64_t const index = group * bias.group_stride + weight * bias.n_stride;
  return bias.dtype == OutDtype::FP32 ? static_cast<float const*>(bias.data)[index]
                                      : __bfloat162float(static_cast<__nv_bfloat16 const*>(bias.data)[index]);
}

/// Multiplies a thread's sums by their rows' factors and adds the bias of their channels. Read only here: registers
/// held over the main loop would cost every kernel, the latency only calls with a bias.
template <class ConfigTag>
__device__ void add_bias(Bias const& bias,
                         Tile const& tile,
                         WeightRows<ConfigTag> const& weight_rows,
                         EpilogueOf<ConfigTag> const& epilogue,
                         RowFactors<ConfigTag> const& rows,
                         Accumulators<ConfigTag>& acc) {
  using T = Traits<ConfigTag>;
  int const warp_group = epilogue.warp_group;
  int const thread = epilogue.thread;
  auto const channel = [&](int weight) {
    return weight < weight_rows.n ? read_bias(bias, tile.group, weight) : 0.f;
  };
  if constexpr (T::kSwapped) {
#pragma unroll
    for (int block_m = 0; block_m < T::kBlocksM; ++block_m) {
      int const row = (warp_group * T::kBlocksM + block_m) * T::kBlockM + accumulator_row(thread);
      float const of_rows[2] = {channel(weight_rows(row)), channel(weight_rows(row + 8))};
#pragma unroll
      for (int i = 0; i < T::kMaxTileN / 2; ++i) {
        int const half = i % 4 / 2;
        acc.value[block_m][i] = acc.value[block_m][i] * rows.value[block_m][half] + of_rows[half];
      }
    }
  } else {
    // Gated, the addresses of a thread's channels follow no one step and would take more registers than there are: the
    // warp group reads them together.
    [[maybe_unused]] float const* table = nullptr;
    if constexpr (T::kGated) {
      float share[T::kMaxTileN / 128];
#pragma unroll
      for (int i = 0; i < T::kMaxTileN / 128; ++i) {
        share[i] = channel(weight_rows(thread + 128 * i));
      }
      table = epilogue.share(share);
    }
#pragma unroll
    for (int j = 0; j < T::kMaxTileN / 8; ++j) {
      int const column = 8 * j + accumulator_column(thread);
      float of_columns[2];
      if constexpr (T::kGated) {
        // Where it stands: the compiler would gather all reads in front.
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(of_columns[0]), "=f"(of_columns[1])
                     : "r"(cute::cast_smem_ptr_to_uint(table + column)));
      } else {
        of_columns[0] = channel(weight_rows(column));
        of_columns[1] = channel(weight_rows(column + 1));
      }
#pragma unroll
      for (int block_m = 0; block_m < T::kBlocksM; ++block_m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& value = acc.value[block_m][4 * j + i];
          value = value * rows.value[block_m][i / 2] + of_columns[i % 2];
        }
      }
    }
  }
}

}  // namespace moe_ext::grouped_gemm
