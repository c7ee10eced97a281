// The C++ side of torch.ops.moe_ext.sort_tokens_configured.
#pragma once

#include <cstdint>
#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "fused_moe/sort.hpp"

namespace moe_ext::fused_moe {

/// Checks what a sort reads; where it writes is left null.
SortParams check_sort(torch::stable::Tensor const& topk_ids,
                      std::int64_t num_experts,
                      std::optional<torch::stable::Tensor> const& expert_map,
                      std::int64_t first_expert);

/// Sorts the slots of `topk_ids` into three contiguous int32 tensors (sort.hpp); as many experts as `offs` is long.
/// `scratch` is int32 and contiguous, of at least sort_tokens_scratch(...) elements. Checks everything memory safety
/// depends on; reads no device memory.
void sort_tokens_configured(torch::stable::Tensor const& topk_ids,
                            torch::stable::Tensor const& offs,
                            torch::stable::Tensor const& row_slot,
                            torch::stable::Tensor const& slot_row,
                            std::optional<torch::stable::Tensor> scratch,
                            std::optional<torch::stable::Tensor> expert_map,
                            std::int64_t first_expert);

/// Elements of scratch for so many slots, 0 where none is needed.
std::int64_t sort_tokens_scratch(std::int64_t num_slots, std::int64_t num_experts);

}  // namespace moe_ext::fused_moe
