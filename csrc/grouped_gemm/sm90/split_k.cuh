// The CTAs of a cluster that split one tile's K: partial sums meet in the first CTA's shared memory.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cutlass/arch/barrier.h>

#include "grouped_gemm/sm90/mainloop.cuh"

namespace moe_ext::grouped_gemm {

/// Deterministic: the first CTA adds its peers' sums in the order of their ranks. Thread t of every CTA holds
/// the same elements of the tile, so that sums never change their place.
///
/// full (first CTA): one arrival per mma warp of every peer, once its sums are written.
/// free (peers): one arrival per mma warp of the first CTA, once their sums are added and may be overwritten.
template <class ConfigTag>
struct SplitK {
  using T = Traits<ConfigTag>;
  static constexpr int kParts = T::kConfig.split_k;
  static constexpr int kWarps = T::kMmaThreads / 32;
  static constexpr int kValues = T::kBlocksM * T::kMaxTileN / 2;

  struct SharedStorage {
    float partial[kParts - 1][kValues][T::kMmaThreads];
    cutlass::arch::ClusterBarrier full;
    cutlass::arch::ClusterBarrier free;

    __device__ void init() {
      full.init(kWarps * (kParts - 1));
      free.init(kWarps);
    }
  };

  SharedStorage& storage;
  int rank;        // of this CTA within the cluster
  int mma_thread;  // 0 .. kMmaThreads - 1
  unsigned phase = 0;

  /// Leaves the whole sum in the first CTA's `acc`; true there. `used` is how many values of a block count.
  __device__ bool reduce(Accumulators<ConfigTag>& acc, int used) {
    return rank == 0 ? collect(acc, used) : send(acc, used);
  }

 private:
  __device__ bool send(Accumulators<ConfigTag> const& acc, int used) {
    storage.free.wait(phase ^ 1);
    phase ^= 1;
    std::uint32_t const target =
        cute::set_block_rank(cute::cast_smem_ptr_to_uint(&storage.partial[rank - 1][0][mma_thread]), 0);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i % (T::kMaxTileN / 2) < used) {
        std::uint32_t const address = target + i * T::kMmaThreads * static_cast<std::uint32_t>(sizeof(float));
        float const value = acc.value[i / (T::kMaxTileN / 2)][i % (T::kMaxTileN / 2)];
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
      }
    }
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
    __syncwarp();
    if (mma_thread % 32 == 0) {
      arrive_remote(&storage.full, 0);
    }
    return false;
  }

  __device__ bool collect(Accumulators<ConfigTag>& acc, int used) {
    wait_remote(&storage.full, phase);
    phase ^= 1;
#pragma unroll
    for (int part = 0; part < kParts - 1; ++part) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (i % (T::kMaxTileN / 2) < used) {
          acc.value[i / (T::kMaxTileN / 2)][i % (T::kMaxTileN / 2)] += storage.partial[part][i][mma_thread];
        }
      }
    }
    __syncwarp();
    int const lane = mma_thread % 32;
    if (lane > 0 && lane < kParts) {
      arrive_remote(&storage.free, static_cast<unsigned>(lane));
    }
    return true;
  }

  __device__ static void arrive_remote(void const* barrier, unsigned cta) {
    std::uint32_t const address = cute::set_block_rank(cute::cast_smem_ptr_to_uint(barrier), cta);
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
  }

  __device__ static void wait_remote(void const* barrier, unsigned parity) {
    std::uint32_t const address = cute::cast_smem_ptr_to_uint(barrier);
    unsigned done = 0;
    while (done == 0) {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n"
          "}\n"
          : "=r"(done)
          : "r"(address), "r"(parity)
          : "memory");
    }
  }
};

}  // namespace moe_ext::grouped_gemm
