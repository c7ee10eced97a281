// What an epilogue needs to know of a launch.
#pragma once

#include "grouped_gemm/params.hpp"

namespace moe_ext::grouped_gemm {

struct EpilogueParams {
  void* out;                    // (num_rows, n), gated (num_rows, n / 2)
  std::int64_t out_row_stride;  // elements
  int n;
  OutDtype out_dtype;
  Gating gating;
  QuantisedFeatures quantised;
};

}  // namespace moe_ext::grouped_gemm
