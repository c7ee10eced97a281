// Checks, then parameters: from torch tensors to a sort.
#include "fused_moe/sort_op.hpp"

#include <limits>

#include "common/cuda_context.hpp"
#include "common/tensor_checks.hpp"
#include "common/tensor_strides.hpp"
#include "fused_moe/sort.hpp"

namespace moe_ext::fused_moe {
namespace {

constexpr char const* kOp = "sort_tokens";

IdType id_type(Tensor const& topk_ids) {
  switch (topk_ids.scalar_type()) {
    case ScalarType::Int:
      return IdType::Int32;
    case ScalarType::Long:
      return IdType::Int64;
    default:
      fail_value(kOp,
                 ": `topk_ids` must have dtype Int or Long, got ",
                 torch::headeronly::toString(topk_ids.scalar_type()));
  }
}

/// The data of a contiguous int32 vector on the device.
int* vector_of(char const* argument, Tensor const& tensor, int device) {
  check_on_device(kOp, argument, tensor, device, "topk_ids");
  check_dtype(kOp, argument, tensor, ScalarType::Int);
  check_rank(kOp, argument, tensor, 1);
  check_value(tensor.size(0) <= 1 || tensor.stride(0) == 1,
              kOp,
              ": `",
              argument,
              "` must be contiguous, got a stride");
  return static_cast<int*>(tensor.mutable_data_ptr());
}

void check_experts(std::int64_t num_experts) {
  check_value(num_experts >= 1 && num_experts <= kMaxExperts,
              kOp,
              ": `num_experts` must be in [1, ",
              kMaxExperts,
              "], got ",
              num_experts);
}

}  // namespace

SortParams check_sort(Tensor const& topk_ids,
                      std::int64_t num_experts,
                      std::optional<Tensor> const& expert_map,
                      std::int64_t first_expert) {
  check_value(topk_ids.is_cuda(), kOp, ": `topk_ids` must be a CUDA tensor, got another kind of device");
  int const device = topk_ids.get_device_index();
  IdType const type = id_type(topk_ids);
  check_rank(kOp, "topk_ids", topk_ids, 2);
  std::int64_t const num_tokens = topk_ids.size(0);
  std::int64_t const top_k = topk_ids.size(1);
  check_value(top_k >= 1 && top_k <= kMaxTopK,
              kOp,
              ": `topk_ids` must have 1 to ",
              kMaxTopK,
              " columns, got ",
              top_k);
  check_value(top_k == 1 || topk_ids.stride(1) == 1,
              kOp,
              ": `topk_ids` must be contiguous in its last dimension, got stride ",
              topk_ids.stride(1));
  check_value(num_tokens <= kMaxSlots / top_k,
              kOp,
              ": `topk_ids` must have at most ",
              kMaxSlots,
              " elements, got ",
              num_tokens,
              " rows");
  check_experts(num_experts);
  check_value(first_expert >= 0 && first_expert <= std::numeric_limits<int>::max(),
              kOp,
              ": `first_expert` must be in [0, 2^31), got ",
              first_expert);
  SortParams params{.topk_ids = topk_ids.const_data_ptr(),
                    .id_type = type,
                    .ids_row_stride = step(topk_ids, 0),
                    .expert_map = nullptr,
                    .num_global = 0,
                    .first_expert = first_expert,
                    .num_tokens = num_tokens,
                    .top_k = static_cast<int>(top_k),
                    .num_experts = static_cast<int>(num_experts),
                    .offs = nullptr,
                    .row_slot = nullptr,
                    .tokens_of_rows = false,
                    .slot_row = nullptr,
                    .scratch = nullptr,
                    .programmatic = false};
  if (expert_map.has_value()) {
    int const* const map = vector_of("expert_map", *expert_map, device);
    params.num_global = expert_map->size(0);
    // An empty tensor may have no address, which would say that there is no map; another one is never read.
    params.expert_map = params.num_global > 0 ? map : static_cast<int const*>(params.topk_ids);
  }
  return params;
}

void sort_tokens_configured(Tensor const& topk_ids,
                            Tensor const& offs,
                            Tensor const& row_slot,
                            Tensor const& slot_row,
                            std::optional<Tensor> scratch,
                            std::optional<Tensor> expert_map,
                            std::int64_t first_expert) {
  check_rank(kOp, "offs", offs, 1);
  SortParams params = check_sort(topk_ids, offs.size(0), expert_map, first_expert);
  int const device = topk_ids.get_device_index();
  params.offs = vector_of("offs", offs, device);
  params.row_slot = vector_of("row_slot", row_slot, device);
  params.slot_row = vector_of("slot_row", slot_row, device);
  std::int64_t const num_slots = params.num_tokens * params.top_k;
  check_size(kOp, "row_slot", 0, row_slot.size(0), num_slots);
  check_size(kOp, "slot_row", 0, slot_row.size(0), num_slots);
  std::int64_t const needed = sort_scratch_elems(num_slots, params.num_experts);
  if (needed > 0) {
    check_value(scratch.has_value(), kOp, ": `scratch` must have ", needed, " elements, got none");
    params.scratch = vector_of("scratch", *scratch, device);
    check_value(scratch->size(0) >= needed,
                kOp,
                ": `scratch` must have at least ",
                needed,
                " elements, got ",
                scratch->size(0));
    check_value(reinterpret_cast<std::uintptr_t>(params.scratch) % 8 == 0,
                kOp,
                ": `scratch` must begin at a multiple of 8 bytes, got another address");
  }
  DeviceGuard const guard(static_cast<torch::stable::accelerator::DeviceIndex>(device));
  sort_tokens(params, current_stream(device));
}

std::int64_t sort_tokens_scratch(std::int64_t num_slots, std::int64_t num_experts) {
  check_experts(num_experts);
  check_value(num_slots >= 0 && num_slots <= kMaxSlots,
              kOp,
              ": the number of slots must be in [0, ",
              kMaxSlots,
              "], got ",
              num_slots);
  return sort_scratch_elems(num_slots, static_cast<int>(num_experts));
}

}  // namespace moe_ext::fused_moe
