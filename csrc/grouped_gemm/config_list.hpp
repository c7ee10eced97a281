// All rows of configs.def: their tag types, and the list as CSV, which Python and the library compare.
#pragma once

#include <iterator>
#include <string>

#include "grouped_gemm/config.hpp"
#include "grouped_gemm/configs.def"

namespace moe_ext::grouped_gemm {

#undef MOE_EXT_CONFIG
#define MOE_EXT_CONFIG(id_, ...) configs::id_::value,
/// Index in this list = index of the kernel.
inline constexpr Config kConfigs[] = {
#include "grouped_gemm/configs.def"
};
#undef MOE_EXT_CONFIG

inline constexpr int kNumConfigs = static_cast<int>(std::size(kConfigs));

constexpr std::string_view name(OperandOrder order) {
  return order == OperandOrder::Plain ? "Plain" : order == OperandOrder::SwapAB ? "SwapAB" : "SwapABRows";
}

constexpr std::string_view name(Dtype dtype) {
  return dtype == Dtype::BF16 ? "BF16" : "FP8";
}

constexpr std::string_view name(Accumulate accumulate) {
  switch (accumulate) {
    case Accumulate::FP32:
      return "FP32";
    case Accumulate::Promoted:
      return "Promoted";
    case Accumulate::Fast:
      return "Fast";
    case Accumulate::Block:
      return "Block";
    case Accumulate::Shifted:
      return "Shifted";
  }
  return "";
}

constexpr std::string_view name(Output output) {
  switch (output) {
    case Output::Rows:
      return "Rows";
    case Output::Gated:
      return "Gated";
    case Output::Either:
      return "Either";
  }
  return "";
}

/// A header line, then one line a kernel.
inline std::string configs_csv() {
  std::string csv =
      "id,order,dtype,accumulate,output,tile_weights,tile_tokens,tile_k_bytes,stages,mma_warp_groups,"
      "split_k,"
      "ctas_per_sm\n";
  for (Config const& config : kConfigs) {
    csv.append(config.id).append(",").append(name(config.order)).append(",").append(name(config.dtype));
    csv.append(",").append(name(config.accumulate)).append(",").append(name(config.output));
    for (int const value : {config.tile_weights,
                            config.tile_tokens,
                            config.tile_k_bytes,
                            config.stages,
                            config.mma_warp_groups,
                            config.split_k,
                            config.ctas_per_sm}) {
      csv.append(",").append(std::to_string(value));
    }
    csv.append("\n");
  }
  return csv;
}

}  // namespace moe_ext::grouped_gemm
