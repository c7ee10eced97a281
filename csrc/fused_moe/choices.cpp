// The memo of choices by problem.
#include "fused_moe/choices.hpp"

#include <bit>

#include "common/memo.hpp"

namespace moe_ext::fused_moe {
namespace {

struct Hash {
  std::size_t operator()(Problem const& problem) const {
    return hash_of(
        {problem.num_slots,
         problem.num_experts,
         problem.hidden,
         problem.intermediate,
         problem.flags * 2 + problem.w13_bias,
         static_cast<std::int64_t>(problem.w13_scale.granularity) * 2 + problem.w13_scale.n_segments,
         static_cast<std::int64_t>(problem.w2_scale.granularity),
         std::bit_cast<std::int64_t>(problem.alpha),
         std::bit_cast<std::int64_t>(problem.limit),
         problem.sm_count});
  }
};

Memo<Problem, Choice, Hash>& memo() {
  static Memo<Problem, Choice, Hash> memo;
  return memo;
}

}  // namespace

std::optional<Choice> recall(Problem const& problem) {
  return memo().recall(problem);
}

void remember(Problem const& problem, Choice const& choice) {
  memo().remember(problem, choice);
}

}  // namespace moe_ext::fused_moe
