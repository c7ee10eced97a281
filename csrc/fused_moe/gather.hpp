// Hidden rows in expert order, as the first GEMM reads them: copied, or quantised to FP8 on the way. No torch.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace moe_ext::fused_moe {

/// What becomes of a row; the numbers are those of the op's argument.
enum class GatherFormat : std::int64_t {
  BF16 = 0,         // copied
  StaticScale = 1,  // FP8, one scale, given
  RowScale = 2,     // FP8, a scale for each row
  RowBlocks = 3,    // FP8, a scale for each 128 values of a row
};

/// Of rows whose FP8 values take the place of what they are made from.
inline constexpr int kMostColumnsInPlace = 32768;

enum class GatherWeights { None, BF16, FP32 };

/// Strides are in elements. Rows of x and out begin at multiples of 16 bytes, and hidden_size is a multiple of 8. Rows
/// before *first_row and from *num_rows on, and rows of slots that are none, are neither read nor written.
struct GatherParams {
  void const* x;  // (num_tokens, hidden_size), BF16
  std::int64_t x_row_stride;
  std::int64_t num_tokens;
  int hidden_size;
  int const*
      row_slot;  // (max_rows,), slot t * top_k + j of each row; or null: row r is token r, and top_k is 1
  /// (num_tokens, top_k), the row of each slot, anything outside [0, max_rows) for none; or null. With it, and without
  /// weights, a token is read once for all of its rows, and neither row_slot nor first_row nor num_rows is read; top_k
  /// is then at most kMaxTopK. No two tokens may have the same row.
  int const* slot_row;
  int top_k;
  int const* num_rows;  // of max_rows, on the device, as the last of the offsets has it; or null: all
  int max_rows;
  int const* first_row = nullptr;  // on the device; null: 0
  void const*
      weights;  // (num_tokens, top_k), factors of the rows, whose products are rounded to BF16; or null
  GatherWeights weights_type;
  std::int64_t weights_token_stride;
  std::int64_t weights_choice_stride;
  GatherFormat format;
  void* out;  // (max_rows, hidden_size), BF16 or FP8 E4M3
  std::int64_t out_row_stride;
  float* scale;  // RowScale: (max_rows,); RowBlocks: (max_rows, ceil(hidden_size / 128))
  std::int64_t scale_row_stride;
  float const* static_scale;  // StaticScale: one
  // May begin before the previous kernel in the stream has ended; waits for it before it reads.
  bool programmatic;
  /// Lets the kernel behind it begin before that wait: for one that reads nothing of the previous kernel's, nor of this
  /// one's, before its own wait.
  bool dependents_first;
  /// *first_row and *num_rows were final before the previous kernel began, so they are read before the wait.
  bool counted_before;
  /// Nothing that is read is the previous kernel's, nor is written where that one reads or writes: the wait is at the
  /// end, so that whoever waits for this kernel has waited for that one too.
  bool beside_previous;
};

/// Rows are quantised bit for bit as quantize_fp8 quantises the gathered rows. Where out is x, without row_slot and
/// with as many bytes between rows, FP8 values take the place of the BF16 values they are made from; scales may then
/// lie behind the values of their row. Otherwise out and x must not overlap.
void gather_quantize(GatherParams const& params, cudaStream_t stream);

}  // namespace moe_ext::fused_moe
