// Scales that change along K (1 x 128 for tokens, 128 x 128 for weights) under Swap-AB: through the ring.
#pragma once

#include "grouped_gemm/params.hpp"
#include "grouped_gemm/sm90/ring.cuh"
#include "grouped_gemm/sm90/token_rows.cuh"
#include "grouped_gemm/sm90/weight_rows.cuh"

namespace moe_ext::grouped_gemm {

/// Index of the scale block along n that holds row `weight`, counted through both segments.
__device__ inline int weight_block(WeightScales const& scales, int weight) {
  int const segment = weight >= scales.segment_n ? 1 : 0;
  return (weight - segment * scales.segment_n + scales.n_offset) / kScaleBlock +
         segment * scales.segment_blocks;
}

/// Loads of a tile's scales, by all lanes of one warp, without waiting for them: 4-byte asynchronous copies, which take
/// any stride, and after each step's an arrival on the full barrier that counts once they have landed. What does not
/// change along K is worked out once a tile: one warp has a few hundred cycles a step.
template <class ConfigTag>
class BlockScaleLoad {
  using T = Traits<ConfigTag>;

 public:
  __device__ BlockScaleLoad(TokenScales const& tokens,
                            WeightScales const& weights,
                            Ring<ConfigTag>& ring,
                            Tile const& tile,
                            WeightRows<ConfigTag> const& weight_rows,
                            int k_blocks,         // of the tokens
                            int weight_k_blocks,  // of the weights: one more where theirs are shifted
                            int first_k_block)    // where this CTA's part of K begins
      : ring_(ring),
        lane_(threadIdx.x % 32),
        num_chunks_((tile.token_width + 31) / 32),
        tokens_(tile.token_end - tile.token_begin - lane_),
        token_row_step_(32 * tokens.row_stride),
        token_k_stride_(tokens.k_stride),
        weight_k_stride_(weights.k_stride),
        k_blocks_left_(k_blocks - first_k_block) {
    token_ = tokens.data + tile.group * tokens.group_shift + first_k_block * tokens.k_stride;
    int const first = tile.token_begin + lane_;
    if constexpr (T::kGathers) {
#pragma unroll
      for (int chunk = 0; chunk < kMaxChunks; ++chunk) {
        int const row = min(first + 32 * chunk, tile.token_end - 1);
        row_offset_[chunk] = token_of_row<ConfigTag>(tokens, row) * tokens.row_stride;
      }
    } else {
      token_ += first * tokens.row_stride;
    }

    constexpr int kBlocks = Ring<ConfigTag>::kWeightBlocks;
    int const part = T::kPartsK == 1 ? 0 : lane_ / kBlocks;  // of an atom of K
    // Of the tile's rows, gated of its gate rows or its up rows, the first and the last.
    int const half = T::kGated && lane_ >= Ring<ConfigTag>::kHalfBlocks ? 1 : 0;
    int const first_row = 8 * half;
    int const last_row = T::kConfig.tile_weights - (T::kGated && half == 0 ? 9 : 1);
    int const block = weight_block(weights, weight_rows.clamped(first_row)) + lane_ - part * kBlocks -
                      half * Ring<ConfigTag>::kHalfBlocks;
    bool const has_block =
        lane_ < T::kPartsK * kBlocks && block <= weight_block(weights, weight_rows.clamped(last_row));
    int const segment = block >= weights.segment_blocks ? 1 : 0;
    weight_ = weights.data + tile.group * weights.group_stride + segment * weights.segment_stride +
              (block - segment * weights.segment_blocks) * weights.n_stride +
              (first_k_block + part) * weights.k_stride;
    weight_k_blocks_left_ = has_block ? weight_k_blocks - first_k_block - part : 0;
  }

  /// Starts the copies of the next step of K.
  __device__ void load(int stage, int slot) {
#pragma unroll
    for (int atom = 0; atom < T::kAtomsK; ++atom) {
      // A stage may reach past K, where operands are zeros: nothing is read there.
      int const tokens = k_blocks_left_ > 0 ? tokens_ : 0;
      float const* token = token_;
#pragma unroll
      for (int chunk = 0; chunk < kMaxChunks; ++chunk) {
        if (chunk < num_chunks_ && 32 * chunk + lane_ < T::kConfig.tile_tokens) {
          float const* const source = T::kGathers ? token + row_offset_[chunk] : token;
          copy(&ring_.token_scales[slot][atom][32 * chunk + lane_], source, 32 * chunk < tokens);
          token += T::kGathers ? 0 : token_row_step_;
        }
      }
      if (lane_ < T::kPartsK * Ring<ConfigTag>::kWeightBlocks) {
        copy(&ring_.weight_scales[slot][atom][lane_], weight_, weight_k_blocks_left_ > 0);
      }
      token_ += token_k_stride_;
      weight_ += weight_k_stride_;
      --k_blocks_left_;
      --weight_k_blocks_left_;
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
        cute::cast_smem_ptr_to_uint(&ring_.full[stage])));
  }

 private:
  static constexpr int kMaxChunks = (T::kConfig.tile_tokens + 31) / 32;

  /// Copies a float, or zero: then `source` is not read.
  __device__ static void copy(float* target, float const* source, bool wanted) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(cute::cast_smem_ptr_to_uint(target)),
                 "l"(source),
                 "r"(wanted ? 4 : 0)
                 : "memory");
  }

  Ring<ConfigTag>& ring_;
  int lane_;
  int num_chunks_;  // of 32 tokens
  int tokens_;      // this lane's first and those every 32 behind it exist below this
  std::int64_t token_row_step_;
  std::int64_t row_offset_[T::kGathers ? kMaxChunks : 1];  // where rows may lie anywhere
  std::int64_t token_k_stride_;
  std::int64_t weight_k_stride_;
  int k_blocks_left_;
  int weight_k_blocks_left_;  // 0: the lane has no block
  float const* token_;        // of the next step; where rows may lie anywhere, that of row 0
  float const* weight_;
};

/// Promotion of one thread's partial sums under Swap-AB, with the scales of a step.
template <class ConfigTag>
struct SwappedBlockPromotion {
  using T = Traits<ConfigTag>;

  Ring<ConfigTag> const& ring;
  int lane_column;            // of the thread's first value within 8 columns
  int block[T::kBlocksM][2];  // of the thread's rows, within the tile's scale blocks
  int change_k;               // shifted: where in each atom of K the weights' next block begins
  bool rows_share_block;      // of the tile's every 16 rows, hence the two of a thread

  __device__ SwappedBlockPromotion(Ring<ConfigTag> const& ring_,
                                   WeightScales const& weights,
                                   WeightRows<ConfigTag> const& weight_rows,
                                   int warp_group,
                                   int thread)
      : ring(ring_),
        lane_column(accumulator_column(thread)),
        change_k(kScaleBlock - weights.k_offset),
        rows_share_block(!(T::kGated && weight_rows.gating.joins) &&
                         (weights.segment_n | weights.n_offset) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < T::kBlocksM * 2; ++i) {
      int const row = (warp_group * T::kBlocksM + i / 2) * T::kBlockM + accumulator_row(thread) + i % 2 * 8;
      int const half = T::kGated ? i % 2 : 0;
      block[i / 2][i % 2] = weight_block(weights, weight_rows.clamped(row)) -
                            weight_block(weights, weight_rows.clamped(8 * half)) +
                            half * Ring<ConfigTag>::kHalfBlocks;
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
  __device__ Factors<kValues> prepare(int slot, int atom, int, int block_m, int column) {
    Factors<kValues> factors{};
    if constexpr (Factors<kValues>::kEarly) {
      read_weights(slot, atom, 0, block_m, factors.weight);
#pragma unroll
      for (int j = 0; j < kValues / 4; ++j) {
        factors.token[j] = token(slot, atom, column + 8 * j);
      }
    }
    return factors;
  }

  template <int kValues>
  __device__ void add(Factors<kValues> factors,
                      int slot,
                      int atom,
                      int part,
                      int block_m,
                      int column,
                      float const (&partial)[kValues],
                      float* sums) const {
    float const(&w)[2] = factors.weight;
    if constexpr (Factors<kValues>::kEarly) {
#pragma unroll
      for (int j = 0; j < kValues / 4; ++j) {
        float2 const t = factors.token[j];
        add_four({t.x * w[0], t.y * w[0]}, {t.x * w[1], t.y * w[1]}, partial + 4 * j, sums + 4 * j);
      }
      return;
    }
    read_weights(slot, atom, part, block_m, factors.weight);
    if (kValues > 32 && !T::kShifted && rows_share_block) {  // nearly always: half the products
#pragma unroll
      for (int j = 0; j < kValues / 4; ++j) {
        float2 const t = token(slot, atom, column + 8 * j);
        float2 const scale{t.x * w[0], t.y * w[0]};
        add_four(scale, scale, partial + 4 * j, sums + 4 * j);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kValues / 4; ++j) {
        float2 const t = token(slot, atom, column + 8 * j);
        add_four({t.x * w[0], t.y * w[0]}, {t.x * w[1], t.y * w[1]}, partial + 4 * j, sums + 4 * j);
      }
    }
  }

 private:
  /// Two neighbouring columns of the thread's first row, then of its second.
  __device__ static void add_four(float2 first, float2 second, float const* partial, float* sums) {
    sums[0] += partial[0] * first.x;
    sums[1] += partial[1] * first.y;
    sums[2] += partial[2] * second.x;
    sums[3] += partial[3] * second.y;
  }

  __device__ void read_weights(int slot, int atom, int part, int block_m, float (&weight)[2]) const {
    float const* const scales = ring.weight_scales[slot][atom] + part * Ring<ConfigTag>::kWeightBlocks;
    weight[0] = scales[block[block_m][0]];
    weight[1] = scales[block[block_m][1]];
  }

  /// Read where it stands: the compiler would gather all reads in front, for which there are no registers.
  __device__ float2 token(int slot, int atom, int column) const {
    float const* const address = ring.token_scales[slot][atom] + column + lane_column;
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(value.x), "=f"(value.y)
                 : "r"(cute::cast_smem_ptr_to_uint(address)));
    return value;
  }
};

}  // namespace moe_ext::grouped_gemm
