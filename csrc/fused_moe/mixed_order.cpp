#include "fused_moe/mixed_order.hpp"

#include "grouped_gemm/tiling.hpp"

namespace moe_ext::fused_moe {
namespace {

bool are_few(MixedLoad const& load) {
  return 4 * load.bf16_experts < load.num_experts;
}

}  // namespace

bool bf16_gate_up_first(MixedLoad const& load) {
  return !are_few(load) && load.slots <= 16 * load.num_experts;
}

bool bf16_down_first(MixedLoad const& load) {
  return !are_few(load) && load.slots > 4 * load.num_experts;
}

int spared_ctas(MixedLoad const& load, grouped_gemm::Config const& config, std::int64_t sm_count) {
  if (!are_few(load) || load.slots > load.num_experts) {
    return 0;
  }
  // Four times the experts, twice the bytes each.
  std::int64_t const bf16 = 8 * load.bf16_experts;
  std::int64_t const fp8 = load.num_experts - load.bf16_experts;
  std::int64_t const clusters = grouped_gemm::resident_clusters(config, sm_count) * bf16 / (bf16 + fp8);
  return static_cast<int>(clusters) * config.split_k;
}

void wait_in_turn(std::initializer_list<std::optional<LayerGemm>*> gemms, grouped_gemm::Wait wait) {
  for (std::optional<LayerGemm>* const gemm : gemms) {
    if (gemm->has_value()) {
      (*gemm)->params.wait = wait;
      (*gemm)->params.programmatic = true;
      wait = grouped_gemm::Wait::AtEnd;
    }
  }
}

}  // namespace moe_ext::fused_moe
