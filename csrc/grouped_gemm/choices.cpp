// A memo behind a lock. It holds nothing that the choice could not be asked for again.
#include "grouped_gemm/choices.hpp"

#include <mutex>
#include <unordered_map>

namespace moe_ext::grouped_gemm {
namespace {

/// Beyond this many problems it starts afresh: a serving engine's batch sizes are hundreds.
constexpr std::size_t kMostChoices = 8192;

struct Hash {
  std::size_t operator()(Problem const& problem) const {
    std::uint64_t hash = static_cast<std::uint64_t>(problem.kind.accumulate) * 2 + problem.kind.swapped;
    for (std::int64_t const part : {problem.num_rows,
                                    problem.expected_rows,
                                    problem.num_groups,
                                    problem.n,
                                    problem.k,
                                    std::int64_t{problem.sm_count}}) {
      hash = (hash ^ static_cast<std::uint64_t>(part)) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

// The one thing that calls leave behind. A pure function's answers, so no order of calls, and no number of threads,
// changes what a call gets.
struct Memo {
  std::mutex mutex;
  std::unordered_map<Problem, std::int64_t, Hash> indices;
};

Memo& memo() {
  static Memo memo;
  return memo;
}

}  // namespace

std::optional<std::int64_t> recall(Problem const& problem) {
  Memo& known = memo();
  std::lock_guard const lock(known.mutex);
  auto const found = known.indices.find(problem);
  return found == known.indices.end() ? std::nullopt : std::optional(found->second);
}

void remember(Problem const& problem, std::int64_t index) {
  Memo& known = memo();
  std::lock_guard const lock(known.mutex);
  if (known.indices.size() >= kMostChoices) {
    known.indices.clear();
  }
  known.indices.insert_or_assign(problem, index);
}

}  // namespace moe_ext::grouped_gemm
