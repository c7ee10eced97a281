// Which experts slots (token, choice) go to, as routing leaves it.
#pragma once

#include <cstdint>

#include <cutlass/fast_math.h>

namespace moe_ext {

enum class IdType { Int32, Int64 };

/// Most slots that are sorted so: by then every warp reads all ids, which costs more than barriers.
inline constexpr int kMaxFewSlots = 128;

/// Strides are in elements. Slot t * top_k + j is choice j of token t.
struct ExpertIds {
  void const* topk_ids = nullptr;  // (num_tokens, top_k), contiguous along top_k; null for no ids
  IdType type = IdType::Int32;
  std::int64_t row_stride = 0;
  int const* expert_map =
      nullptr;  // (num_global,), the expert here of each id, or anything else; null for no map
  std::int64_t num_global = 0;    // 0 without a map
  std::int64_t first_expert = 0;  // without a map: the id of expert 0, at least 0
  int num_experts = 0;
  int bits = 0;  // of an expert's number, and of num_experts, which slots without an expert have
  int num_slots = 0;
  cutlass::FastDivmod top_k;
};

}  // namespace moe_ext
