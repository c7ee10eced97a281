// In which order the GEMMs of a mixture run, and who leaves whom room. Host arithmetic alone; measured in
// docs/notes/mixtures.md.
#pragma once

#include <cstdint>

#include "grouped_gemm/tiling.hpp"

namespace moe_ext::fused_moe {

/// What decides in a stage with experts in both precisions.
struct MixedLoad {
  std::int64_t slots;
  std::int64_t num_experts;
  std::int64_t bf16_experts;
};

/// Whether so few experts are in BF16 that their GEMM only comes beside the one in FP8. Python asks too, for kernels.
constexpr bool are_few(MixedLoad const& load) {
  return 4 * load.bf16_experts < load.num_experts;
}

/// Whether gate_up in BF16 is the first. With many experts that in FP8 begins sooner behind it than the stages behind
/// gate_up do where the one in BF16 ends it. Measured up to 16 rows an expert.
constexpr bool bf16_gate_up_first(MixedLoad const& load) {
  return !are_few(load) && load.slots <= 16 * load.num_experts;
}

/// Whether down in BF16 is the first, so that the intermediate of the other experts is quantised beside it. Better by
/// 1 % at 8 rows an expert, equal at 1 and 4, worse by 1 % at 16.
constexpr bool bf16_down_first(MixedLoad const& load) {
  return !are_few(load) && load.slots > 4 * load.num_experts && load.slots < 16 * load.num_experts;
}

/// The CTAs that a GEMM in FP8 leaves, for that of a few experts in BF16 to begin beside it: three times its share of
/// the weights, since seldom do all of its tiles have rows, but sometimes. With more than a row an expert the one in
/// FP8 needs every SM.
constexpr int spared_ctas(MixedLoad const& load, grouped_gemm::Config const& config, std::int64_t sm_count) {
  if (!are_few(load) || load.slots > load.num_experts) {
    return 0;
  }
  // Three times the experts, twice the bytes each.
  std::int64_t const bf16 = 6 * load.bf16_experts;
  std::int64_t const fp8 = load.num_experts - load.bf16_experts;
  std::int64_t const clusters = grouped_gemm::resident_clusters(config, sm_count) * bf16 / (bf16 + fp8);
  return static_cast<int>(clusters) * config.split_k;
}

}  // namespace moe_ext::fused_moe
