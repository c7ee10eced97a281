// From the number of slots to the kernels that sort them.
#include "fused_moe/sort.hpp"

#include <bit>

#include "common/check.hpp"
#include "fused_moe/sort_launch.hpp"

namespace moe_ext::fused_moe {

std::int64_t sort_scratch_elems(std::int64_t num_slots, int num_experts) {
  SortPlan const plan = plan_sort(num_slots, num_experts);
  // For each bin one count from each tile, and their sum.
  return plan.way == SortWay::Grid ? std::int64_t{sort_bins(num_experts)} * (plan.tiles + 1) : 0;
}

SortKernelParams make_sort_kernel_params(SortParams const& params, SortPlan const& plan) {
  return {.problem = params,
          .choices_of_token = cutlass::FastDivmod(params.top_k),
          .num_slots = static_cast<int>(params.num_tokens * params.top_k),
          .bins = sort_bins(params.num_experts),
          .bits = static_cast<int>(std::bit_width(static_cast<unsigned>(params.num_experts))),
          .tiles = plan.tiles};
}

void sort_tokens(SortParams const& params, cudaStream_t stream) {
  check_value(params.num_experts >= 1 && params.num_experts <= kMaxExperts,
              "sort_tokens: the number of experts must be in [1, ",
              kMaxExperts,
              "], got ",
              params.num_experts);
  check_value(params.top_k >= 1 && params.num_tokens >= 0 && params.num_tokens <= kMaxSlots / params.top_k,
              "sort_tokens: there must be at most ",
              kMaxSlots,
              " slots, got ",
              params.num_tokens,
              " tokens with ",
              params.top_k);
  std::int64_t const slots = params.num_tokens * params.top_k;
  check_value(params.listed == nullptr || slots <= kMaxFewSlots,
              "sort_tokens: there must be at most ",
              kMaxFewSlots,
              " slots for a list of their rows, got ",
              slots);
  SortPlan const plan = plan_sort(slots, params.num_experts);
  SortKernelParams const kernel_params = make_sort_kernel_params(params, plan);
  switch (plan.way) {
    case SortWay::Few:
      return sort_few(kernel_params, plan, stream);
    case SortWay::Cta:
    case SortWay::Cluster:
      return sort_in_one_launch(kernel_params, plan, stream);
    case SortWay::Grid:
      check_value(params.scratch != nullptr, "sort_tokens: so many slots need scratch, got none");
      return sort_in_three_launches(kernel_params, plan, stream);
  }
}

}  // namespace moe_ext::fused_moe
