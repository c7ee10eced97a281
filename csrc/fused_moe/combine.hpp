// The end of a layer: each token's rows, weighted and added in the order of its choices. No torch.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace moe_ext::fused_moe {

enum class CombineType { BF16, FP32 };

/// Strides are in elements. Rows of y, addend and out are aligned to 16 bytes, and hidden_size is a multiple of 8.
struct CombineParams {
  void const* y;  // (num_rows, hidden_size), BF16
  std::int64_t y_row_stride;
  std::int64_t num_rows;
  int const* slot_row;  // (num_tokens * top_k,); what is no row of y contributes nothing
  void const* weights;  // (num_tokens, top_k), or null for 1
  CombineType weights_type;
  std::int64_t weights_token_stride;
  std::int64_t weights_choice_stride;
  void const* addend;  // (num_tokens, hidden_size), or null
  CombineType addend_type;
  std::int64_t addend_row_stride;
  void* out;  // (num_tokens, hidden_size)
  CombineType out_type;
  std::int64_t out_row_stride;
  std::int64_t num_tokens;
  int top_k;  // 1 to kMaxTopK
  int hidden_size;
  float routed_scale;
  bool programmatic;  // may begin before the previous kernel has ended, for which it then waits
  // Of all that is read, y alone may come from the previous kernel: the rest is read while that still runs.
  bool only_y_is_new;
};

/// out[t] = routed_scale * sum over j of weights[t][j] * y[slot_row[t * top_k + j]] + addend[t], in fp32 with every
/// product and sum rounded, as written; rounded once more to out's type.
void combine(CombineParams const& params, cudaStream_t stream);

}  // namespace moe_ext::fused_moe
