// In which order the GEMMs of a mixture run, what each of them waits for, and who leaves whom room. No torch.
// Measured: docs/notes/mixtures.md.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "fused_moe/layer.hpp"

namespace moe_ext::fused_moe {

/// What decides.
struct MixedLoad {
  std::int64_t slots;
  std::int64_t num_experts;
  std::int64_t bf16_experts;  // of the stage, not all and not none
};

/// Whether gate_up in BF16 is the first. With many experts that in FP8 begins sooner behind it than the stages behind
/// gate_up do where the one in BF16 ends it. Measured up to 16 rows an expert.
bool bf16_gate_up_first(MixedLoad const& load);

/// Whether down in BF16 is the first, so that the intermediate of the other experts is quantised beside it.
bool bf16_down_first(MixedLoad const& load);

/// The CTAs that a GEMM in FP8 leaves, for that of a few experts in BF16 to begin beside it: four times its share of
/// the weights, since seldom do all of its tiles have rows, but sometimes. With more than a row an expert the one in
/// FP8 needs every SM.
int spared_ctas(MixedLoad const& load, grouped_gemm::Config const& config, std::int64_t sm_count);

/// The first GEMM that there is waits as it has to, the others beside it.
void wait_in_turn(std::initializer_list<std::optional<LayerGemm>*> gemms, grouped_gemm::Wait wait);

}  // namespace moe_ext::fused_moe
