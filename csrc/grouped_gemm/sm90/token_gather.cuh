// Tokens in where a group's rows lie anywhere in `a`: by 16-byte asynchronous copies, not by TMA.
//
// A TMA box of one row takes about 30 ns, 3.8 us for 128 rows; these copies bring 128 rows in as little time as one box
// of as many neighbouring rows does (docs/notes/token-gather.md).
#pragma once

#include "grouped_gemm/sm90/ring.cuh"
#include "grouped_gemm/sm90/token_rows.cuh"

namespace moe_ext::grouped_gemm {

/// Loads of a tile's tokens, by all lanes of kGatherWarps warps, without waiting for them: into the places where a TMA
/// box in the 128-byte swizzle would put them. Eight lanes take a row of a stage's atom, each always the same 16 bytes.
template <class ConfigTag>
class TokenGather {
  using T = Traits<ConfigTag>;

 public:
  __device__ TokenGather(GatheredTokens const& tokens,
                         TokenScales const& scales,
                         Ring<ConfigTag>& ring,
                         int first_k_tile)  // where this CTA's part of K begins
      : tokens_(tokens),
        scales_(scales),
        ring_(ring),
        first_byte_(first_k_tile * T::kAtomsK * kAtomBytes + lane() % kLanesPerRow * kPieceBytes) {}

  /// A tile's first step comes next, in this stage.
  __device__ void begin(Tile const& tile, int stage) {
    if constexpr (T::kGathersScales) {
      load_scales(tile, stage);
    }
    int const first_row = lane() / kLanesPerRow;
    rows_ = tile.token_end - tile.token_begin - first_row;
    bytes_left_ = tokens_.k_bytes - first_byte_;
    source_ = tokens_.a + first_byte_;
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      bool const exists = kRowsTogether * i < rows_;
      unsigned const row = exists ? tokens_.of_row[tile.token_begin + first_row + kRowsTogether * i] : 0;
      offset_[i] = row * tokens_.row_pieces;
    }
  }

  /// Starts the copies of the next step of K. Rows past the tile's last are left as they are: what becomes of them is
  /// not stored.
  __device__ void load(int stage) {
    int const first_row = lane() / kLanesPerRow;
    int const place = first_row * kAtomBytes + (lane() % kLanesPerRow ^ first_row) * kPieceBytes;
#pragma unroll
    for (int atom = 0; atom < T::kAtomsK; ++atom) {
      unsigned const target = cute::cast_smem_ptr_to_uint(ring_.tokens[stage][atom] + place);
#pragma unroll
      for (int i = 0; i < kRowsOfLane; ++i) {
        if (kRowsTogether * i < rows_) {
          copy(target + i * kRowsTogether * kAtomBytes,
               source_ + static_cast<std::uint64_t>(offset_[i]) * kPieceBytes,
               bytes_left_ > 0);
        }
      }
      source_ += kAtomBytes;
      bytes_left_ -= kAtomBytes;
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
        cute::cast_smem_ptr_to_uint(&ring_.full[stage])));
  }

 private:
  static constexpr int kPieceBytes = 16;
  static constexpr int kLanesPerRow = kAtomBytes / kPieceBytes;
  static constexpr int kRowsTogether = 32 * kGatherWarps / kLanesPerRow;
  static constexpr int kRowsOfLane = T::kConfig.tile_tokens / kRowsTogether;
  static_assert(kRowsTogether % 8 == 0, "a lane's rows have one place in the swizzle, which repeats after 8");

  /// Copies a piece, or zeros past K: then `source` is not read.
  __device__ static void copy(unsigned target, unsigned char const* source, bool wanted) {
    asm volatile(
        "{.reg .pred ignored; setp.eq.u32 ignored, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, "
        "ignored;}" ::"r"(target),
        "l"(source),
        "r"(static_cast<unsigned>(wanted)));
  }

  /// A scale for each row of a tile; with the copies of the stage they arrive at its barrier.
  __device__ void load_scales(Tile const& tile, int stage) {
    static_assert(T::kConfig.tile_tokens <= 32 * kGatherWarps, "a lane for each row");
    int const row = tile.token_begin + lane();
    if (scales_.row_stride != 0 && row < tile.token_end) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                       cute::cast_smem_ptr_to_uint(&ring_.row_scales[stage][lane()])),
                   "l"(scales_.data + tokens_.of_row[row] * scales_.row_stride));
    }
  }

  /// Of all that gather.
  __device__ static int lane() {
    return static_cast<int>(threadIdx.x) % (32 * kGatherWarps);
  }

  GatheredTokens const& tokens_;
  TokenScales const& scales_;
  Ring<ConfigTag>& ring_;
  int first_byte_;                // of each row, this lane's
  int rows_;                      // this lane's first and those every 8 behind it exist below this
  int bytes_left_;                // of K, from this lane's next 16 on
  unsigned char const* source_;   // of row 0 of `a`
  unsigned offset_[kRowsOfLane];  // of the rows, in pieces
};

}  // namespace moe_ext::grouped_gemm
