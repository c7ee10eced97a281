// The memo of kernels by problem.
#include "grouped_gemm/choices.hpp"

#include "common/memo.hpp"

namespace moe_ext::grouped_gemm {
namespace {

struct Hash {
  std::size_t operator()(Problem const& problem) const {
    return hash_of({static_cast<std::int64_t>(problem.kind.accumulate) * 2 + problem.kind.swapped,
                    problem.num_rows,
                    problem.expected_rows,
                    problem.num_groups,
                    problem.n,
                    problem.k,
                    problem.sm_count});
  }
};

Memo<Problem, std::int64_t, Hash>& memo() {
  static Memo<Problem, std::int64_t, Hash> memo;
  return memo;
}

}  // namespace

std::optional<std::int64_t> recall(Problem const& problem) {
  return memo().recall(problem);
}

void remember(Problem const& problem, std::int64_t index) {
  memo().remember(problem, index);
}

}  // namespace moe_ext::grouped_gemm
