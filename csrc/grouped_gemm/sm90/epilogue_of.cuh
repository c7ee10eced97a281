// The epilogue of a kernel, by what it makes of its sums.
#pragma once

#include "grouped_gemm/sm90/epilogue.cuh"
#include "grouped_gemm/sm90/gated_epilogue.cuh"

namespace moe_ext::grouped_gemm {

template <class ConfigTag>
struct EpilogueChoice
    : std::conditional<Traits<ConfigTag>::kGated, GatedEpilogue<ConfigTag>, Epilogue<ConfigTag>> {};

template <class ConfigTag>
using EpilogueOf = typename EpilogueChoice<ConfigTag>::type;

}  // namespace moe_ext::grouped_gemm
