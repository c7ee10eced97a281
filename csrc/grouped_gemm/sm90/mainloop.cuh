// Stages in, accumulators out: WGMMA by the mma warp groups.
#pragma once

#include <utility>

#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>

#include "grouped_gemm/sm90/masked_operand.cuh"
#include "grouped_gemm/sm90/ring.cuh"

namespace moe_ext::grouped_gemm {

/// Accumulators of one warp group: for block `m` of 64 rows, thread t holds rows t/4 and t/4 + 8 of its warp's
/// 16; value 4 * j + {0, 1} is columns 8 * j + 2 * (t % 4) + {0, 1} of the first row, {2, 3} of the second. So a
/// narrower tile's values are a prefix of a wider one's, and one epilogue serves all widths.
template <class ConfigTag>
struct Accumulators {
  using T = Traits<ConfigTag>;
  float value[T::kBlocksM][T::kMaxTileN / 2];
};

/// Factors of the rows that a thread's accumulators are in.
template <class ConfigTag>
struct RowFactors {
  float value[Traits<ConfigTag>::kBlocksM][2];

  __device__ static RowFactors all(float factor) {
    RowFactors result;
#pragma unroll
    for (auto& rows : result.value) {
      rows[0] = factor;
      rows[1] = factor;
    }
    return result;
  }
};

/// The math of one tile whose N extent is kTileN.
template <class ConfigTag, int kTileN>
struct MainloopMma {
  using T = Traits<ConfigTag>;
  using Element = typename T::Element;
  using State = RingState<T::kConfig.stages>;
  static constexpr int kInstructionN = kTileN <= T::kMaxInstructionN ? kTileN : kTileN / 2;
  static constexpr int kBlocksN = kTileN / kInstructionN;
  static constexpr int kValues = kInstructionN / 2;  // per thread and 64-row block
  static constexpr int kInstructionsK = kAtomBytes / 32;
  /// Registers for everything but sums: found by compiling, fewer spill.
  static constexpr int kOtherRegisters = T::kScalesInRing ? 64 : 40;
  static constexpr bool kSetsFit =
      kBlocksN == 1 &&
      T::kBlocksM * T::kMaxTileN / 2 + kValues * T::kAtomsK + kOtherRegisters <= T::kMmaRegisters;
  static constexpr bool kNarrow = kValues * T::kAtomsK <= 32;
  /// Atoms of a stage that have partial sums of their own: while one's are promoted, the tensor core makes the next
  /// one's (docs/notes/promotion.md).
  static constexpr int kTogether = !T::kRegisterWeights && (kNarrow || kSetsFit) ? T::kAtomsK : 1;
  /// A narrow tile waits for the tensor core more than it works: its atoms wait once.
  static constexpr bool kWaitOnce = kNarrow || kTogether == 1;
  using Op = decltype(cute::SM90::GMMA::ss_op_selector<
                      Element,
                      Element,
                      float,
                      cute::Shape<cute::Int<T::kBlockM>, cute::Int<kInstructionN>, cute::Int<T::kAtomK>>>());

  Ring<ConfigTag>& ring;
  int warp_group;
  int row_bytes;  // whole rows: from one to the next

  /// Consumes `k_tiles` stages starting at `state` and leaves the sums in the first kTileN columns of `acc`.
  template <class Promotion>
  __device__ void run(State& state, int k_tiles, Accumulators<ConfigTag>& acc, Promotion& promotion) const {
    if constexpr (T::kPromoted) {
      run_promoted(state, k_tiles, acc, promotion);
    } else {
      run_direct(state, k_tiles, acc);
    }
  }

 private:
  __device__ void run_direct(State& state, int k_tiles, Accumulators<ConfigTag>& acc) const {
    clear(acc);
    int previous_stage = -1;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      ring.full[state.stage].wait(state.phase);
      fence(acc);
      cute::warpgroup_arrive();
#pragma unroll
      for (int atom = 0; atom < T::kAtomsK; ++atom) {
#pragma unroll
        for (int block_m = 0; block_m < T::kBlocksM; ++block_m) {
          multiply(state.stage, atom, block_m, 0, cute::SM90::GMMA::ScaleOut::One, acc.value[block_m]);
        }
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();  // the previous stage's products are done
      fence(acc);
      if (previous_stage >= 0) {
        ring.release(previous_stage);
      }
      previous_stage = state.stage;
      state.advance();
    }
    cute::warpgroup_wait<0>();
    fence(acc);
    ring.release(previous_stage);
  }

  template <class Promotion>
  __device__ void run_promoted(State& state,
                               int k_tiles,
                               Accumulators<ConfigTag>& acc,
                               Promotion& promotion) const {
    clear(acc);
    float partial[kTogether][kValues];
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      ring.full[state.stage].wait(state.phase);
#pragma unroll
      for (int atom = 0; atom < T::kAtomsK; atom += kTogether) {
#pragma unroll
        for (int block_m = 0; block_m < T::kBlocksM; ++block_m) {
#pragma unroll
          for (int block_n = 0; block_n < kBlocksN; ++block_n) {
            bool const last =
                atom == T::kAtomsK - kTogether && block_m == T::kBlocksM - 1 && block_n == kBlocksN - 1;
            float* const sums = acc.value[block_m] + block_n * kValues;
            if constexpr (T::kRegisterWeights) {
              promote_parts(state, atom, block_m, block_n, last, promotion, partial[0], sums);
            } else {
              promote(state, k_tile, atom, block_m, block_n, last, promotion, partial, sums);
            }
          }
        }
      }
      state.advance();
    }
  }

  template <class Promotion>
  using FactorsOf = decltype(std::declval<Promotion&>().template prepare<kValues>(0, 0, 0, 0, 0));

  /// One 64 x kInstructionN block over kTogether atoms of K. `last`: of the stage, which is then released.
  template <class Promotion>
  __device__ void promote(State const& state,
                          int k_tile,
                          int atom,
                          int block_m,
                          int block_n,
                          bool last,
                          Promotion& promotion,
                          float (&partial)[kTogether][kValues],
                          float* sums) const {
    int const column = block_n * kInstructionN;
    fence(partial);
    cute::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      multiply(state.stage, atom + i, block_m, block_n, cute::SM90::GMMA::ScaleOut::Zero, partial[i]);
      if constexpr (!kWaitOnce) {
        cute::warpgroup_commit_batch();
      }
    }
    if constexpr (kWaitOnce) {
      cute::warpgroup_commit_batch();
    }
    FactorsOf<Promotion> factors[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      int const k_block = k_tile * T::kAtomsK + atom + i;
      factors[i] = promotion.template prepare<kValues>(state.scale_slot, atom + i, k_block, block_m, column);
    }
    if constexpr (kWaitOnce) {
      cute::warpgroup_wait<0>();
      fence(partial);
      if (last) {
        ring.release(state.stage);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        promotion.add(factors[i], state.scale_slot, atom + i, 0, block_m, column, partial[i], sums);
      }
    } else {
      // Not a loop: what is waited for is a template argument.
      [&]<int... kSet>(std::integer_sequence<int, kSet...>) {
        (promote_set<kSet>(factors[kSet], state, atom, block_m, column, last, promotion, partial[kSet], sums),
         ...);
      }(std::make_integer_sequence<int, kTogether>{});
    }
  }

  /// Waits for the partial sums of one of the atoms that were started together, and promotes them.
  template <int kSet, class Promotion>
  __device__ void promote_set(FactorsOf<Promotion> const& factors,
                              State const& state,
                              int atom,
                              int block_m,
                              int column,
                              bool last,
                              Promotion& promotion,
                              float (&partial)[kValues],
                              float* sums) const {
    cute::warpgroup_wait<kTogether - 1 - kSet>();
    fence(partial);
    if (last && kSet == kTogether - 1) {
      ring.release(state.stage);
    }
    promotion.add(factors, state.scale_slot, atom + kSet, 0, block_m, column, partial, sums);
  }

  /// One 64 x kInstructionN block over one atom of K with weights from registers. Where their scale changes within the
  /// atom: a sum for each side of the change, from weights that are zero on the other. Whole rows: zero from the row's
  /// end on, where the next one begins.
  template <class Promotion>
  __device__ void promote_parts(State const& state,
                                int atom,
                                int block_m,
                                int block_n,
                                bool last,
                                Promotion& promotion,
                                float (&partial)[kValues],
                                float* sums) const {
    int const row = (warp_group * T::kBlocksM + block_m) * T::kBlockM;
    MaskedOperand const weights =
        T::kWholeRows ? MaskedOperand::rows(
                            ring.weights[state.stage][0] + row * row_bytes + atom * kAtomBytes, row_bytes)
                      : MaskedOperand::swizzled(ring.weights[state.stage][atom] + row * kAtomBytes);
    int const change = T::kWholeRows ? row_bytes - atom * kAtomBytes : promotion_change(promotion);
    int const column = block_n * kInstructionN;
    std::uint64_t const tokens = descriptor(ring.tokens[state.stage][atom] + column * kAtomBytes);
#pragma unroll
    for (int part = 0; part < T::kPartsK; ++part) {
      MaskedOperand::Registers operand;
      weights.read(change, part, operand);
      fence(partial);
      cute::warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < kInstructionsK; ++i) {
        multiply_registers(operand[i],
                           tokens + 2 * i,
                           partial,
                           i == 0 ? cute::SM90::GMMA::ScaleOut::Zero : cute::SM90::GMMA::ScaleOut::One,
                           std::make_index_sequence<kValues>{});
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      fence(partial);
      if (last && part == T::kPartsK - 1) {
        ring.release(state.stage);
      }
      auto const factors = promotion.template prepare<kValues>(state.scale_slot, atom, 0, block_m, column);
      promotion.add(factors, state.scale_slot, atom, part, block_m, column, partial, sums);
    }
  }

  template <class Promotion>
  __device__ static int promotion_change([[maybe_unused]] Promotion const& promotion) {
    if constexpr (T::kShifted) {
      return promotion.change_k;
    } else {
      return kAtomBytes;
    }
  }

  template <std::size_t... kIndex>
  __device__ static void multiply_registers(unsigned const (&m)[4],
                                            std::uint64_t desc_n,
                                            float* values,
                                            cute::SM90::GMMA::ScaleOut scale,
                                            std::index_sequence<kIndex...>) {
    using RegisterOp =
        decltype(cute::SM90::GMMA::rs_op_selector<
                 Element,
                 Element,
                 float,
                 cute::Shape<cute::Int<T::kBlockM>, cute::Int<kInstructionN>, cute::Int<T::kAtomK>>>());
    RegisterOp::fma(m[0], m[1], m[2], m[3], desc_n, values[kIndex]..., scale);
  }

  /// All of one atom's K for one 64 x kInstructionN block.
  __device__ void multiply(
      int stage, int atom, int block_m, int block_n, cute::SM90::GMMA::ScaleOut scale, float* values) const {
    unsigned char const* m_operand = T::kSwapped ? ring.weights[stage][atom] : ring.tokens[stage][atom];
    unsigned char const* n_operand = T::kSwapped ? ring.tokens[stage][atom] : ring.weights[stage][atom];
    int const row_m = (warp_group * T::kBlocksM + block_m) * T::kBlockM;
    std::uint64_t const desc_m = descriptor(m_operand + row_m * kAtomBytes);
    std::uint64_t const desc_n = descriptor(n_operand + block_n * kInstructionN * kAtomBytes);
#pragma unroll
    for (int i = 0; i < kInstructionsK; ++i) {
      // 32 bytes of K further on, in the descriptor's units of 16 bytes
      multiply_add(desc_m + 2 * i, desc_n + 2 * i, values, scale, std::make_index_sequence<kValues>{});
      scale = cute::SM90::GMMA::ScaleOut::One;
    }
  }

  template <std::size_t... kIndex>
  __device__ static void multiply_add(std::uint64_t desc_m,
                                      std::uint64_t desc_n,
                                      float* values,
                                      cute::SM90::GMMA::ScaleOut scale,
                                      std::index_sequence<kIndex...>) {
    Op::fma(desc_m, desc_n, values[kIndex]..., scale);
  }

  /// A K-major operand of 128-byte rows in the 128-byte swizzle: 8-row atoms, 1024 bytes apart.
  __device__ static std::uint64_t descriptor(void const* smem) {
    cute::GmmaDescriptor desc;
    desc.desc_ = 0;
    desc.bitfield.start_address_ = static_cast<std::uint16_t>(cute::cast_smem_ptr_to_uint(smem) >> 4);
    desc.bitfield.leading_byte_offset_ = 1;  // unused in this layout
    desc.bitfield.stride_byte_offset_ = 1024 >> 4;
    desc.bitfield.layout_type_ = static_cast<std::uint8_t>(cute::SM90::GMMA::LayoutType::B128);
    return desc.desc_;
  }

  __device__ static void clear(Accumulators<ConfigTag>& acc) {
#pragma unroll
    for (int block_m = 0; block_m < T::kBlocksM; ++block_m) {
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) {
        acc.value[block_m][i] = 0.f;
      }
    }
  }

  template <int kSets>
  __device__ static void fence(float (&partial)[kSets][kValues]) {
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      fence(partial[set]);
    }
  }

  __device__ static void fence(float (&partial)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      cute::warpgroup_fence_operand(partial[i]);
    }
  }

  __device__ static void fence(Accumulators<ConfigTag>& acc) {
#pragma unroll
    for (int block_m = 0; block_m < T::kBlocksM; ++block_m) {
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) {
        cute::warpgroup_fence_operand(acc.value[block_m][i]);
      }
    }
  }
};

}  // namespace moe_ext::grouped_gemm
