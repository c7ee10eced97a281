// The warps that bring operands and scales into the ring: what each of them runs.
#pragma once

#include "grouped_gemm/sm90/block_scales.cuh"
#include "grouped_gemm/sm90/kernel_params.cuh"
#include "grouped_gemm/sm90/ring.cuh"
#include "grouped_gemm/sm90/tile_scheduler.cuh"
#include "grouped_gemm/sm90/token_gather.cuh"

namespace moe_ext::grouped_gemm {

template <class ConfigTag>
struct LoadWarps {
  using T = Traits<ConfigTag>;
  static constexpr Config kConfig = T::kConfig;
  using Scheduler = TileScheduler<ConfigTag>;
  using Load = MainloopLoad<ConfigTag>;
  using State = RingState<kConfig.stages>;

  /// Descriptors are parameters, cold in every launch; the first load would wait for them.
  __device__ static void prefetch_maps(TensorMaps const& maps, bool gathers) {
    constexpr Config config = kConfig;
    prefetch(&maps.weights);
    prefetch(&maps.out);
    if (gathers) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kNumTokenWidths; ++i) {
      if (has_token_width(config, token_width(i))) {
        prefetch(&maps.tokens[i]);
      }
    }
  }

  /// One CTA, the likeliest to have the fewest tiles, waits for the previous kernel's end, so that this kernel ends no
  /// sooner. The others leave their SMs to the next kernel, which can load weights there.
  __device__ static void wait_at_end() {
    if (blockIdx.x == gridDim.x - 1) {
      cudaGridDependencySynchronize();
    }
  }

  /// Warp 0: tiles, weights, and tokens that lie in order.
  __device__ static void load(KernelParams const& params, Ring<ConfigTag>& ring, int cta_rank) {
    bool const leader = threadIdx.x == 0;
    Load const loader{params.maps, ring, first_k_tile(params, cta_rank), params.row_bytes, params.gathered};
    if (params.wait == Wait::ForAll) {
      cudaGridDependencySynchronize();
    }
    Scheduler scheduler = make_scheduler(params);
    State state;
    Tile tile;
    if constexpr (takes_list(kConfig)) {
      tile = load_by_one_call(params, ring, loader, scheduler, state);
    } else {
      tile = load_by_turns(params, ring, loader, scheduler, state);
    }
    ring.empty[state.stage].wait(state.phase ^ 1);
    if (leader) {
      ring.info[state.stage] = {tile, 0};
      loader.tell(state.stage);
      ring.full[state.stage].arrive();
    }
    __syncwarp();
    if (params.wait == Wait::AtEnd) {
      wait_at_end();
    }
  }

  /// The load warp's walk again, for scales: they may come from the previous kernel, so none before it has ended. Where
  /// the first tile can be found before that, it is: the offsets are then at hand when the wait ends.
  __device__ static void load_scales(KernelParams const& params, Ring<ConfigTag>& ring, int cta_rank) {
    if (params.wait == Wait::ForAll) {
      cudaGridDependencySynchronize();
    }
    Scheduler scheduler = make_scheduler(params);
    State state;
    // One call of the scheduler, which is inlined: a kernel of few tokens is fetched faster (docs/notes/cold-code.md).
    while (true) {
      Tile const tile = scheduler.next();
      if (params.wait == Wait::ForTokens) {
        cudaGridDependencySynchronize();  // returns at once after the first time
      }
      if (tile.group < 0) {
        break;
      }
      BlockScaleLoad<ConfigTag> loader(params.scale_a,
                                       params.scale_b,
                                       ring,
                                       tile,
                                       weight_rows<ConfigTag>(params, tile),
                                       params.k_blocks,
                                       params.weight_k_blocks,
                                       first_k_tile(params, cta_rank) * T::kAtomsK);
#pragma unroll 1
      for (int k_tile = 0; k_tile < params.k_tiles; ++k_tile) {
        ring.empty[state.stage].wait(state.phase ^ 1);
        loader.load(state.stage, state.scale_slot);
        state.advance();
      }
    }
    ring.empty[state.stage].wait(state.phase ^ 1);
    ring.full[state.stage].arrive();
  }

  /// Tokens whose rows lie anywhere, for the stages that the load warp tells of.
  __device__ static void gather_tokens(KernelParams const& params, Ring<ConfigTag>& ring, int cta_rank) {
    if (params.wait != Wait::AtEnd) {
      cudaGridDependencySynchronize();
    }
    if constexpr (takes_list(kConfig)) {
      // Nearer by when the first tile is known.
      int const row = static_cast<int>(threadIdx.x) % 32 * (kLineBytes / 4);
      if (params.groups.listed != nullptr && row < params.groups.num_rows) {
        asm volatile("prefetch.global.L1 [%0];" ::"l"(params.gathered.of_row + row));
      }
    }
    TokenGather<ConfigTag> gather(params.gathered, params.scale_a, ring, first_k_tile(params, cta_rank));
    for (State state;; state.advance()) {
      ring.told[state.stage].wait(state.phase);
      StageInfo const info = ring.info[state.stage];
      if (info.tile.group < 0) {
        ring.full[state.stage].arrive();
        break;
      }
      if (info.k_tile == 0) {
        gather.begin(info.tile, state.stage);
      }
      gather.load(state.stage);
    }
  }

 private:
  static constexpr int kLineBytes = 128;

  // Weights that nobody reads again leave L2 first; tokens and the code of kernels stay (docs/notes/l2-hints.md).
  __device__ static std::uint64_t weight_hint(KernelParams const& params, Scheduler const& scheduler) {
    return params.few_outputs && scheduler.weights_read_once() ? Load::kEvictFirst : Load::kEvictNormal;
  }

  /// All tiles, up to the one that says that there are no more, which is returned.
  __device__ static Tile load_by_turns(KernelParams const& params,
                                       Ring<ConfigTag>& ring,
                                       Load const& loader,
                                       Scheduler& scheduler,
                                       State& state) {
    bool const leader = threadIdx.x == 0;
    Tile tile = scheduler.next();
    int k_tile = 0;
    auto const advance = [&] {
      state.advance();
      if (++k_tile == params.k_tiles) {
        k_tile = 0;
        tile = scheduler.next();
      }
    };

    if (params.wait == Wait::ForTokens) {
      // Fill the ring with weights, which no running kernel writes; then wait, then add the tokens.
      int filled = 0;
      for (; filled < kConfig.stages && tile.group >= 0; ++filled) {
        if (leader) {
          loader.load_weights(filled, {tile, k_tile}, weight_hint(params, scheduler));
        }
        advance();
      }
      cudaGridDependencySynchronize();
      if (leader) {
        for (int stage = 0; stage < filled; ++stage) {
          loader.load_tokens(stage, ring.info[stage]);
        }
      }
    }
    cudaTriggerProgrammaticLaunchCompletion();

    while (tile.group >= 0) {
      ring.empty[state.stage].wait(state.phase ^ 1);
      if (leader) {
        StageInfo const info{tile, k_tile};
        loader.load_weights(state.stage, info, weight_hint(params, scheduler));
        loader.load_tokens(state.stage, info);
      }
      advance();
    }
    return tile;
  }

  /// The same with one call of the scheduler, which is inlined: where it finds tiles in two ways, three would make the
  /// kernel longer than what is fetched for nothing may be (docs/notes/cold-code.md).
  __device__ static Tile load_by_one_call(KernelParams const& params,
                                          Ring<ConfigTag>& ring,
                                          Load const& loader,
                                          Scheduler& scheduler,
                                          State& state) {
    bool const leader = threadIdx.x == 0;
    bool weights_alone = params.wait == Wait::ForTokens;  // which no running kernel writes
    int filled = 0;
    if (!weights_alone) {
      cudaTriggerProgrammaticLaunchCompletion();
    }
    Tile tile{};
    for (int k_tile = 0;; k_tile = k_tile + 1 == params.k_tiles ? 0 : k_tile + 1) {
      if (k_tile == 0) {
        tile = scheduler.next();
      }
      if (weights_alone && (tile.group < 0 || filled == kConfig.stages)) {
        weights_alone = false;
        cudaGridDependencySynchronize();
        if (leader) {
          for (int stage = 0; stage < filled; ++stage) {
            loader.load_tokens(stage, ring.info[stage]);
          }
        }
        cudaTriggerProgrammaticLaunchCompletion();
      }
      if (tile.group < 0) {
        return tile;
      }
      ring.empty[state.stage].wait(state.phase ^ 1);
      if (leader) {
        StageInfo const info{tile, k_tile};
        loader.load_weights(state.stage, info, weight_hint(params, scheduler));
        if (!weights_alone) {
          loader.load_tokens(state.stage, info);
        }
      }
      filled += weights_alone ? 1 : 0;
      state.advance();
    }
  }

  __device__ static void prefetch(CUtensorMap const* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
  }

  /// Where a CTA's part of K begins.
  __device__ static int first_k_tile(KernelParams const& params, int cta_rank) {
    return kConfig.split_k > 1 ? cta_rank * params.k_tiles : 0;
  }

  __device__ static Scheduler make_scheduler(KernelParams const& params) {
    return Scheduler(
        params.groups, params.weight_tiles, blockIdx.x / kConfig.split_k, gridDim.x / kConfig.split_k);
  }
};

}  // namespace moe_ext::grouped_gemm
