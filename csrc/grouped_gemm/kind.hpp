// Which kernels serve a call: what its dtype and the layout of its scales ask of them.
#pragma once

#include "grouped_gemm/checks.hpp"
#include "grouped_gemm/config.hpp"

namespace moe_ext::grouped_gemm {

struct Kind {
  Dtype dtype;
  Accumulate accumulate;
  bool swapped;  // only Swap-AB kernels: scale blocks do not begin at multiples of 128 of n

  bool operator==(Kind const&) const = default;
};

/// The kind of a call whose operands have passed. `fast`: sums may stay in the tensor core's accumulator.
Kind kind_of(Call const& call, Sizes const& sizes, Dtype dtype, bool fast);

constexpr bool serves(Config const& kernel, Kind const& kind) {
  return kernel.output == Output::Rows && kernel.dtype == kind.dtype &&
         kernel.accumulate == kind.accumulate && (!kind.swapped || is_swapped(kernel.order));
}

}  // namespace moe_ext::grouped_gemm
