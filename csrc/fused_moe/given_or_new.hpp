// Memory of a layer: the caller's or its own.
#pragma once

#include <cstdint>
#include <optional>

#include "common/new_tensor.hpp"

namespace moe_ext::fused_moe {

/// Memory of its own for what was not given. Without memory it is a refusal, so that Python allocates: its exception is
/// torch's own, which callers may wait for.
template <std::size_t kRank>
torch::stable::Tensor given_or_new(char const* op,
                                   char const* argument,
                                   std::optional<torch::stable::Tensor> const& given,
                                   std::int64_t const (&sizes)[kRank],
                                   int dtype,
                                   int device) {
  if (given.has_value()) {
    return *given;
  }
  std::optional<torch::stable::Tensor> made = new_empty(sizes, dtype, device);
  check_value(
      made.has_value(), op, ": `", argument, "` must be given where there is no memory for it, got none");
  return *std::move(made);
}

}  // namespace moe_ext::fused_moe
