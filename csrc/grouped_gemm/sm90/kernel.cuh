// The persistent kernel: one load warp feeds a ring of stages, the mma warp groups drain it.
//
//  who                        waits on                        for
//  load warp                  the previous kernel (PDL)       offsets and `a`; by Wait::ForTokens for `a` alone, by
//                                                             Wait::AtEnd for nothing, and in one CTA at the end
//  load warp                  empty[s]                        every mma warp to have read it
//  scale warp (block scales)  the previous kernel, empty[s]   the same
//  gather warps (if asked)    the previous kernel, told[s]    the load warp to have a tile for stage s
//  mma warps                  full[s]                         tile info and both operands of stage s
//  mma warp group             named barrier kStaging + wg     its own staging buffer to turn over
//  all threads of a cluster   cluster barrier, start and end  peers' barriers to exist; peers to be done
//
// The mma warps read nothing that a previous kernel may have written except through full[s], which the load
// warp completes after its own wait; so they need no wait of their own. The same holds for what they write. By
// Wait::AtEnd they read nothing of the previous kernel's at all.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cutlass/arch/reg_reconfig.h>

#include "grouped_gemm/sm90/bias.cuh"
#include "grouped_gemm/sm90/block_scales.cuh"
#include "grouped_gemm/sm90/epilogue_of.cuh"
#include "grouped_gemm/sm90/kernel_params.cuh"
#include "grouped_gemm/sm90/load_warps.cuh"
#include "grouped_gemm/sm90/mainloop.cuh"
#include "grouped_gemm/sm90/output_scales.cuh"
#include "grouped_gemm/sm90/plain_block_scales.cuh"
#include "grouped_gemm/sm90/promotion.cuh"
#include "grouped_gemm/sm90/split_k.cuh"

namespace moe_ext::grouped_gemm {

/// Names SplitK's storage without instantiating it where K is not split.
template <class ConfigTag>
struct SplitStorageOf {
  using type = typename SplitK<ConfigTag>::SharedStorage;
};

template <class ConfigTag>
struct Kernel {
  using T = Traits<ConfigTag>;
  static constexpr Config kConfig = T::kConfig;
  using Loads = LoadWarps<ConfigTag>;
  using State = RingState<kConfig.stages>;

  struct NoSplit {};
  using SplitStorage = typename std::
      conditional_t<kConfig.split_k == 1, std::type_identity<NoSplit>, SplitStorageOf<ConfigTag>>::type;

  struct SharedStorage {
    Ring<ConfigTag> ring;
    typename EpilogueOf<ConfigTag>::SharedStorage epilogue;
    [[no_unique_address]] SplitStorage split;
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert((kSharedBytes + 1024) * kConfig.ctas_per_sm <= 228 * 1024,
                "co-resident CTAs share 228 KiB of shared memory, 1 KiB of it reserved for each");

  __device__ static void run(KernelParams const& params, SharedStorage& storage) {
    if (params.wait == Wait::AtEnd) {
      // What the next kernel may read before its own wait was final before this one began.
      cudaTriggerProgrammaticLaunchCompletion();
      // Its SMs are the next kernel's at once, and no code is fetched for nothing.
      if (has_no_rows(params.groups)) {
        Loads::wait_at_end();
        return;
      }
    }
    int const warp = threadIdx.x / 32;
    int const cta_rank = kConfig.split_k == 1 ? 0 : static_cast<int>(cute::block_rank_in_cluster());
    bool const gathers = T::kGathers && params.gathered.of_row != nullptr;
    if (threadIdx.x == 128) {
      storage.ring.init(gathers);
      if constexpr (kConfig.split_k > 1) {
        storage.split.init();
      }
      cutlass::arch::fence_barrier_init();
    }
    if (threadIdx.x == 32) {
      Loads::prefetch_maps(params.maps, gathers);
    }
    if constexpr (kConfig.split_k == 1) {
      __syncthreads();
    } else {
      cute::cluster_sync();
    }
    if (warp < 4) {
      cutlass::arch::warpgroup_reg_dealloc<T::kLoadRegisters>();
      if (warp == 0) {
        Loads::load(params, storage.ring, cta_rank);
      }
      if constexpr (T::kScalesInRing) {
        if (warp == 1) {
          Loads::load_scales(params, storage.ring, cta_rank);
        }
      }
      if constexpr (T::kGathers) {
        if (warp >= 4 - kGatherWarps && gathers) {
          Loads::gather_tokens(params, storage.ring, cta_rank);
        }
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<T::kMmaRegisters>();
      multiply(params, storage, cta_rank);
    }
    if constexpr (kConfig.split_k > 1) {
      cute::cluster_sync();  // a peer may still arrive on this CTA's barriers
    }
  }

 private:
  using Split = typename std::conditional_t<kConfig.split_k == 1,
                                            std::type_identity<NoSplit>,
                                            std::type_identity<SplitK<ConfigTag>>>::type;

  __device__ static void multiply(KernelParams const& params, SharedStorage& storage, int cta_rank) {
    int const warp_group = warp_group_of_thread();
    int const thread = static_cast<int>(threadIdx.x) % 128;
    EpilogueOf<ConfigTag> epilogue{params.epilogue, params.maps.out, storage.epilogue, warp_group, thread};
    State state;
    if constexpr (T::kScalesAhead) {
      multiply_ahead(params, storage.ring, state, epilogue);
    } else {
      [[maybe_unused]] Split split = make_split(storage, cta_rank, warp_group * 128 + thread);
      for (Tile tile = next_tile(storage.ring, state); tile.group >= 0;
           tile = next_tile(storage.ring, state)) {
        multiply_and_store(params, storage.ring, state, tile, split, epilogue);
      }
    }
    epilogue.finish();
  }

  /// The tile that the next stage belongs to. One lane reads it: the one that later hands the stage back.
  __device__ static Tile next_tile(Ring<ConfigTag>& ring, State const& state) {
    ring.full[state.stage].wait(state.phase);
    Tile tile{};
    if (threadIdx.x % 32 == 0) {
      tile = ring.info[state.stage].tile;
    }
    auto const from_first = [](int value) { return __shfl_sync(kFullWarp, value, 0); };
    return {from_first(tile.group),
            from_first(tile.weight_tile),
            from_first(tile.token_begin),
            from_first(tile.token_end),
            from_first(tile.token_width)};
  }

  __device__ static void multiply_and_store(KernelParams const& params,
                                            Ring<ConfigTag>& ring,
                                            State& state,
                                            Tile const& tile,
                                            Split& split,
                                            EpilogueOf<ConfigTag>& epilogue) {
    Accumulators<ConfigTag> acc;
    int const warp_group = epilogue.warp_group;
    if constexpr (T::kBlockScaled) {
      SwappedBlockPromotion<ConfigTag> promotion(
          ring, params.scale_b, weight_rows<ConfigTag>(params, tile), warp_group, epilogue.thread);
      multiply_tile(params, ring, state, tile, warp_group, acc, promotion);
      if (reduce(split, acc, tile)) {
        finish_tile(params, epilogue, acc, tile, RowFactors<ConfigTag>::all(1.f));
      }
    } else {
      OutputScales<ConfigTag> const scales(params.scale_a,
                                           gathered_scales(params, ring, state.stage),
                                           params.scale_b,
                                           tile,
                                           weight_rows<ConfigTag>(params, tile),
                                           warp_group,
                                           epilogue.thread);
      if constexpr (quantises_by_one_scale(kConfig)) {
        prefetch_static_scale(params.epilogue.quantised);
      }
      UnscaledPromotion promotion;
      multiply_tile(params, ring, state, tile, warp_group, acc, promotion);
      if (reduce(split, acc, tile)) {
        finish_tile(params, epilogue, acc, tile, scales.apply(acc, epilogue));
      }
    }
  }

  /// The scales of the tokens of the tile that begins with this stage, where they came with them.
  __device__ static float const* gathered_scales([[maybe_unused]] KernelParams const& params,
                                                 [[maybe_unused]] Ring<ConfigTag> const& ring,
                                                 [[maybe_unused]] int stage) {
    if constexpr (T::kGathersScales) {
      if (params.gathered.of_row != nullptr && params.scale_a.row_stride != 0) {
        return ring.row_scales[stage];
      }
    }
    return nullptr;
  }

  /// All of a CTA's tiles, where scales are read from memory by the threads that use them: the first ones of a tile
  /// while the tile before it is stored, so that no tile waits for them.
  __device__ static void multiply_ahead(KernelParams const& params,
                                        Ring<ConfigTag>& ring,
                                        State& state,
                                        EpilogueOf<ConfigTag>& epilogue) {
    auto const promotion_of = [&](Tile const& tile) {
      return PlainBlockPromotion<ConfigTag>(params.scale_a,
                                            params.scale_b,
                                            tile,
                                            weight_rows<ConfigTag>(params, tile),
                                            params.k_blocks,
                                            epilogue.warp_group,
                                            epilogue.thread);
    };
    Tile tile = next_tile(ring, state);
    auto promotion = promotion_of(tile);
    while (tile.group >= 0) {
      Accumulators<ConfigTag> acc;
      multiply_tile(params, ring, state, tile, epilogue.warp_group, acc, promotion);
      Tile const next = next_tile(ring, state);
      promotion = promotion_of(next);
      finish_tile(params, epilogue, acc, tile, RowFactors<ConfigTag>::all(1.f));
      tile = next;
    }
  }

  /// Of the mma warp groups. It is the same for all lanes of a warp; where `__shfl_sync` tells the compiler so, operand
  /// addresses stay in uniform registers: mixtral FP8 at T = 8192 1160 in place of 1139 TFLOP/s at steady clock. Plain
  /// block-scaled kernels lose 3 % by it and are not told.
  __device__ static int warp_group_of_thread() {
    int const warp_group = static_cast<int>(threadIdx.x) / 128 - 1;
    return T::kScalesAhead ? warp_group : __shfl_sync(kFullWarp, warp_group, 0);
  }

  /// Finished sums to memory: times their rows' factors, plus the bias if there is one.
  __device__ static void finish_tile(KernelParams const& params,
                                     EpilogueOf<ConfigTag>& epilogue,
                                     Accumulators<ConfigTag>& acc,
                                     Tile const& tile,
                                     RowFactors<ConfigTag> rows) {
    if constexpr (takes_bias(kConfig)) {
      if (params.bias.data != nullptr) {
        add_bias(params.bias, tile, weight_rows<ConfigTag>(params, tile), epilogue, rows, acc);
        rows = RowFactors<ConfigTag>::all(1.f);
      }
    }
    epilogue.store(acc, tile, rows);
  }

  /// The epilogue would wait for it.
  __device__ static void prefetch_static_scale(QuantisedFeatures const& quantised) {
    if (quantised.static_scale != nullptr) {
      asm volatile("prefetch.global.L1 [%0];" ::"l"(quantised.static_scale));
    }
  }

  __device__ static Split make_split(SharedStorage& storage, int cta_rank, int mma_thread) {
    if constexpr (kConfig.split_k == 1) {
      return {};
    } else {
      return {storage.split, cta_rank, mma_thread};
    }
  }

  /// Leaves the sum over all of K in `acc` of the CTA that is to store it; true there.
  __device__ static bool reduce([[maybe_unused]] Split& split,
                                Accumulators<ConfigTag>& acc,
                                Tile const& tile) {
    if constexpr (kConfig.split_k == 1) {
      return true;
    } else {
      return split.reduce(acc, (T::kSwapped ? tile.token_width : T::kMaxTileN) / 2);
    }
  }

  /// Runs the main loop compiled for the tile's N extent.
  template <class Promotion>
  __device__ static void multiply_tile(KernelParams const& params,
                                       Ring<ConfigTag>& ring,
                                       State& state,
                                       Tile const& tile,
                                       int warp_group,
                                       Accumulators<ConfigTag>& acc,
                                       Promotion& promotion) {
    if constexpr (T::kSwapped) {
      [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
        (multiply_width<token_width(kIndex)>(params, ring, state, tile, warp_group, acc, promotion), ...);
      }(std::make_index_sequence<kNumTokenWidths>{});
    } else {
      MainloopMma<ConfigTag, kConfig.tile_weights>{ring, warp_group, params.row_bytes}.run(
          state, params.k_tiles, acc, promotion);
    }
  }

  template <int kWidth, class Promotion>
  __device__ static void multiply_width(KernelParams const& params,
                                        Ring<ConfigTag>& ring,
                                        State& state,
                                        Tile const& tile,
                                        int warp_group,
                                        Accumulators<ConfigTag>& acc,
                                        Promotion& promotion) {
    if constexpr (has_token_width(kConfig, kWidth)) {
      if (tile.token_width == kWidth) {
        MainloopMma<ConfigTag, kWidth>{ring, warp_group, params.row_bytes}.run(
            state, params.k_tiles, acc, promotion);
      }
    }
  }
};

template <class ConfigTag>
__global__ void __launch_bounds__(Traits<ConfigTag>::kThreads, Traits<ConfigTag>::kConfig.ctas_per_sm)
    grouped_gemm_kernel(__grid_constant__ KernelParams const params) {
  extern __shared__ __align__(1024) unsigned char shared[];  // a swizzle atom is 1 KiB
  Kernel<ConfigTag>::run(params, *reinterpret_cast<typename Kernel<ConfigTag>::SharedStorage*>(shared));
}

}  // namespace moe_ext::grouped_gemm
