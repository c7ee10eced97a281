// WGMMA's M operand in registers, one side of an element of K zeroed: for a scale that changes within an atom of K, and
// for rows that end within one.
#pragma once

#include "grouped_gemm/config.hpp"
#include "grouped_gemm/sm90/traits.cuh"

namespace moe_ext::grouped_gemm {

/// 64 rows x 128 bytes of FP8, as the four instructions of 32 bytes of K want them: thread t of a warp holds, of its
/// warp's rows t / 4 and t / 4 + 8, bytes 4 * (t % 4) to + 3 of either half of the 32.
class MaskedOperand {
 public:
  static constexpr int kInstructions = kAtomBytes / 32;
  using Registers = unsigned[kInstructions][4];  // row and row + 8 of the first half, then of the second

  /// `block`: 64 rows of 128 bytes in TMA's 128-byte swizzle, at a multiple of 1 KiB.
  __device__ static MaskedOperand swizzled(unsigned char const* block) {
    return MaskedOperand(block, kAtomBytes, row_of_lane() % 8);
  }

  /// `block`: 64 rows, `row_bytes` apart.
  __device__ static MaskedOperand rows(unsigned char const* block, int row_bytes) {
    return MaskedOperand(block, row_bytes, 0);
  }

  /// Part 0 keeps the elements of K before `change`, part 1 those from it on. Read again for each part: registers
  /// for both would not fit beside the sums.
  __device__ void read(int change, int part, Registers& value) const {
#pragma unroll
    for (int i = 0; i < kInstructions; ++i) {
      unsigned const address = row_ + ((2 * i + first_piece_) ^ swizzle_) * 16;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(value[i][0]), "=r"(value[i][1]), "=r"(value[i][2]), "=r"(value[i][3])
                   : "r"(address)
                   : "memory");
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const first = 32 * i + 16 * half + threadIdx.x % 4 * 4;
        int const before = min(max(change - first, 0), 4);  // bytes of the register
        // A funnel shift, because a shift by 32 bits is undefined.
        unsigned const low = __funnelshift_lc(0xffffffffu, 0u, 8 * before);
        unsigned const keep = part == 0 ? low : ~low;
        value[i][2 * half] &= keep;
        value[i][2 * half + 1] &= keep;
      }
    }
  }

 private:
  __device__ MaskedOperand(unsigned char const* block, int row_bytes, int swizzle)
      : row_(static_cast<unsigned>(__cvta_generic_to_shared(block + row_of_lane() * row_bytes))),
        first_piece_(threadIdx.x % 32 / 16),
        swizzle_(swizzle) {}

  /// Of the four 8 x 16 byte matrices of an instruction: the row that this lane addresses.
  __device__ static int row_of_lane() {
    int const lane = threadIdx.x % 32;
    return threadIdx.x % 128 / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
  }

  unsigned row_;  // shared-memory address
  int first_piece_;
  int swizzle_;
};

}  // namespace moe_ext::grouped_gemm
