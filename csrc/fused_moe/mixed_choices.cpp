// The memo of choices by problem, for layers of experts in two precisions.
#include "fused_moe/mixed_choices.hpp"

#include <bit>

#include "common/memo.hpp"

namespace moe_ext::fused_moe {
namespace {

struct Hash {
  std::size_t operator()(MixedProblem const& problem) const {
    return hash_of(
        {problem.num_slots,
         problem.parts.both_fp8,
         problem.parts.gate_up_fp8,
         problem.parts.both_bf16,
         problem.parts.down_fp8,
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

Memo<MixedProblem, MixedChoice, Hash>& memo() {
  static Memo<MixedProblem, MixedChoice, Hash> memo;
  return memo;
}

}  // namespace

std::optional<MixedChoice> recall(MixedProblem const& problem) {
  return memo().recall(problem);
}

void remember(MixedProblem const& problem, MixedChoice const& choice) {
  memo().remember(problem, choice);
}

}  // namespace moe_ext::fused_moe
