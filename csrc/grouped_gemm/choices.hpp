// The kernels that Python chose, remembered by problem, so that a further call need not ask.
#pragma once

#include <cstdint>
#include <optional>

#include "grouped_gemm/kind.hpp"

namespace moe_ext::grouped_gemm {

/// All that the choice of a kernel depends on (python/moe_ext/_dispatch.py); host numbers only.
struct Problem {
  Kind kind;
  std::int64_t num_rows;
  std::int64_t expected_rows;  // of an average group in the masked layout, -1 if not said
  std::int64_t num_groups;
  std::int64_t n;
  std::int64_t k;
  int sm_count;

  bool operator==(Problem const&) const = default;
};

/// The index that was remembered for `problem`, if there is one.
std::optional<std::int64_t> recall(Problem const& problem);

/// Remembers `index` for `problem`.
void remember(Problem const& problem, std::int64_t index);

}  // namespace moe_ext::grouped_gemm
