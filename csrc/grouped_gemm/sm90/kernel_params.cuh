// What a launch tells its kernel.
#pragma once

#include "grouped_gemm/sm90/epilogue_params.cuh"
#include "grouped_gemm/sm90/mainloop_load.cuh"
#include "grouped_gemm/sm90/token_rows.cuh"
#include "grouped_gemm/sm90/weight_rows.cuh"

namespace moe_ext::grouped_gemm {

struct KernelParams {
  TensorMaps maps;
  EpilogueParams epilogue;
  GroupRows groups;
  GatheredTokens gathered;
  TokenScales scale_a;
  WeightScales scale_b;
  Bias bias;
  int weight_tiles;
  int k_tiles;          // of each CTA
  int k_blocks;         // of 128, all of K
  int weight_k_blocks;  // the weights' scale blocks along K
  Wait wait;
  int few_outputs;
  int row_bytes;  // whole rows: of K in a box of weights
};

/// Which rows of weights a tile has.
template <class ConfigTag>
__device__ WeightRows<ConfigTag> weight_rows(KernelParams const& params, Tile const& tile) {
  return {tile.weight_tile, params.epilogue.n, params.epilogue.gating};
}

}  // namespace moe_ext::grouped_gemm
