// How sums over 128 of K get from the tensor core into fp32 registers, where no scale enters them.
#pragma once

namespace moe_ext::grouped_gemm {

/// What the main loop asks of a promotion, and the one without scales, which come after the main loop:
///
/// prepare<kValues>(scale_slot, atom, k_block, block_m, column): called while the tensor core works; what it returns
/// goes to `add`.
/// add(prepared, scale_slot, atom, part, block_m, column, partial, sums): adds `partial`, the products over one part of
/// an atom of K of block `block_m` and the columns from `column` on, to `sums`.
struct UnscaledPromotion {
  struct Factors {};

  template <int kValues>
  __device__ Factors prepare(int, int, int, int, int) {
    return {};
  }

  template <int kValues>
  __device__ void add(Factors, int, int, int, int, int, float const (&partial)[kValues], float* sums) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      sums[i] += partial[i];
    }
  }
};

}  // namespace moe_ext::grouped_gemm
