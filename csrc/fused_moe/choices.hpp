// What Python chose for a layer, remembered by problem, so that a further call need not ask.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "fused_moe/weight_scale.hpp"

namespace moe_ext::fused_moe {

/// All that a choice depends on (python/moe_ext/_fused_moe_kernels.py, _activations.py); host numbers only.
struct Problem {
  std::int64_t num_slots;
  std::int64_t num_experts;
  std::int64_t hidden;
  std::int64_t intermediate;
  std::int64_t flags;  // LayerFlag and the activation (op.hpp)
  WeightScale w13_scale;
  WeightScale w2_scale;
  bool w13_bias;
  double alpha;
  double limit;
  int sm_count;

  bool operator==(Problem const&) const = default;
};

struct Choice {
  std::int64_t w13_config;  // rows of configs.def
  std::int64_t w2_config;
  std::array<float, 6>
      gating;  // linear, cubic, quintic, gate_limit, up_limit, up_offset of grouped_gemm::Gating
};

/// The choice that was remembered for `problem`, if there is one.
std::optional<Choice> recall(Problem const& problem);

/// Remembers `choice` for `problem`.
void remember(Problem const& problem, Choice const& choice);

}  // namespace moe_ext::fused_moe
