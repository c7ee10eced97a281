// Scales that change along K (1 x 128 for tokens, 128 x 128 for weights) under Swap-AB: through the ring.
#pragma once

#include "grouped_gemm/params.hpp"
#include "grouped_gemm/sm90/ring.cuh"

namespace moe_ext::grouped_gemm {

/// Index of the scale block along n that holds row `weight`, counted through both segments.
__device__ inline int weight_block(WeightScales const& scales, int weight) {
  int const segment = weight >= scales.segment_n ? 1 : 0;
  return (weight - segment * scales.segment_n + scales.n_offset) / kScaleBlock +
         segment * scales.segment_blocks;
}

/// Loads of one stage's scales, by all lanes of one warp, without waiting for them: 4-byte asynchronous copies,
/// which take any stride, and then an arrival on the full barrier that counts once they have landed.
template <class ConfigTag>
struct BlockScaleLoad {
  using T = Traits<ConfigTag>;

  TokenScales const& tokens;
  WeightScales const& weights;
  Ring<ConfigTag>& ring;
  int num_weights;
  int k_blocks;         // of the tokens
  int weight_k_blocks;  // of the weights: one more where theirs are shifted and the last one is reached
  int first_k_tile;     // where this CTA's part of K begins

  __device__ void load(int stage, StageInfo const& info) const {
    Tile const& tile = info.tile;
    int const lane = threadIdx.x % 32;
    int const weight_begin = tile.weight_tile * T::kConfig.tile_weights;
    int const weight_end = min(weight_begin + T::kConfig.tile_weights, num_weights);
    constexpr int kBlocks = Ring<ConfigTag>::kWeightBlocks;
    int const part = T::kPartsK == 1 ? 0 : lane / kBlocks;  // of an atom of K
    int const block = weight_block(weights, weight_begin) + lane - part * kBlocks;
    bool const has_block = block <= weight_block(weights, weight_end - 1);
    int const segment = block >= weights.segment_blocks ? 1 : 0;
    float const* const weight_source = weights.data + tile.group * weights.group_stride +
                                       segment * weights.segment_stride +
                                       (block - segment * weights.segment_blocks) * weights.n_stride;
    float const* const token_source = tokens.data + tile.group * tokens.group_shift;
#pragma unroll
    for (int atom = 0; atom < T::kAtomsK; ++atom) {
      int const k_block = (first_k_tile + info.k_tile) * T::kAtomsK + atom;
      bool const in_k = k_block < k_blocks;  // a stage may reach past K, where operands are zeros
      for (int i = lane; i < tile.token_width; i += 32) {
        int const token = tile.token_begin + i;
        copy(&ring.token_scales[stage][atom][i],
             token_source + token * tokens.row_stride + k_block * tokens.k_stride,
             in_k && token < tile.token_end);
      }
      if (lane < T::kPartsK * kBlocks) {
        copy(&ring.weight_scales[stage][atom][lane],
             weight_source + (k_block + part) * weights.k_stride,
             k_block + part < weight_k_blocks && has_block);
      }
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
        cute::cast_smem_ptr_to_uint(&ring.full[stage])));
  }

 private:
  /// Copies a float, or zero: then `source` is not read.
  __device__ static void copy(float* target, float const* source, bool wanted) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(cute::cast_smem_ptr_to_uint(target)),
                 "l"(source),
                 "r"(wanted ? 4 : 0)
                 : "memory");
  }
};

/// Promotion of one thread's partial sums under Swap-AB, with the scales of a stage.
template <class ConfigTag>
struct SwappedBlockPromotion {
  using T = Traits<ConfigTag>;
  static constexpr bool kReadsStage = true;

  Ring<ConfigTag> const& ring;
  int lane_column;            // of the thread's first value within 8 columns
  int block[T::kBlocksM][2];  // of the thread's rows, within the tile's scale blocks
  int change_k;               // shifted: where in each atom of K the weights' next block begins

  __device__ SwappedBlockPromotion(Ring<ConfigTag> const& ring_,
                                   WeightScales const& weights,
                                   Tile const& tile,
                                   int num_weights,
                                   int warp_group,
                                   int thread)
      : ring(ring_), lane_column(accumulator_column(thread)), change_k(kScaleBlock - weights.k_offset) {
    int const weight_begin = tile.weight_tile * T::kConfig.tile_weights;
#pragma unroll
    for (int i = 0; i < T::kBlocksM * 2; ++i) {
      int const row = (warp_group * T::kBlocksM + i / 2) * T::kBlockM + accumulator_row(thread) + i % 2 * 8;
      int const weight = min(weight_begin + row, num_weights - 1);
      block[i / 2][i % 2] = weight_block(weights, weight) - weight_block(weights, weight_begin);
    }
  }

  /// Scales of the thread's two rows and of its columns of `kValues` values. The few of a narrow tile are read while
  /// the tensor core works, so that the sums do not wait for them too; many would not fit into registers.
  template <int kValues>
  struct Factors {
    static constexpr bool kEarly = kValues <= 16 && T::kPartsK == 1;
    float weight[2];
    float2 token[kEarly ? kValues / 4 : 1];
  };

  template <int kValues>
  __device__ Factors<kValues> prepare(int stage, int atom, int, int block_m, int column) {
    Factors<kValues> factors{};
    if constexpr (Factors<kValues>::kEarly) {
      read_weights(stage, atom, 0, block_m, factors.weight);
#pragma unroll
      for (int j = 0; j < kValues / 4; ++j) {
        factors.token[j] = token(stage, atom, column + 8 * j);
      }
    }
    return factors;
  }

  template <int kValues>
  __device__ void add(Factors<kValues> factors,
                      int stage,
                      int atom,
                      int part,
                      int block_m,
                      int column,
                      float const (&partial)[kValues],
                      float* sums) const {
    if constexpr (!Factors<kValues>::kEarly) {
      read_weights(stage, atom, part, block_m, factors.weight);
    }
    float const(&w)[2] = factors.weight;
#pragma unroll
    for (int j = 0; j < kValues / 4; ++j) {
      float2 const t = Factors<kValues>::kEarly ? factors.token[j] : token(stage, atom, column + 8 * j);
      sums[4 * j + 0] += partial[4 * j + 0] * (t.x * w[0]);
      sums[4 * j + 1] += partial[4 * j + 1] * (t.y * w[0]);
      sums[4 * j + 2] += partial[4 * j + 2] * (t.x * w[1]);
      sums[4 * j + 3] += partial[4 * j + 3] * (t.y * w[1]);
    }
  }

 private:
  __device__ void read_weights(int stage, int atom, int part, int block_m, float (&weight)[2]) const {
    float const* const scales = ring.weight_scales[stage][atom] + part * Ring<ConfigTag>::kWeightBlocks;
    weight[0] = scales[block[block_m][0]];
    weight[1] = scales[block[block_m][1]];
  }

  __device__ float2 token(int stage, int atom, int column) const {
    return *reinterpret_cast<float2 const*>(ring.token_scales[stage][atom] + column + lane_column);
  }
};

}  // namespace moe_ext::grouped_gemm
