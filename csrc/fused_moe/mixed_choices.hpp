// What Python chose for a layer of experts in two precisions, remembered by problem (choices.hpp).
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "fused_moe/mixed_parts.hpp"
#include "fused_moe/weight_scale.hpp"

namespace moe_ext::fused_moe {

/// All that a choice depends on (python/moe_ext/precision/_mixed_kernels.py); host numbers only.
struct MixedProblem {
  std::int64_t num_slots;
  MixedParts parts;
  std::int64_t hidden;
  std::int64_t intermediate;
  std::int64_t flags;  // LayerFlag and the activation (op.hpp)
  WeightScale w13_scale;
  WeightScale w2_scale;
  bool w13_bias;  // of those in FP8
  double alpha;
  double limit;
  int sm_count;

  bool operator==(MixedProblem const&) const = default;
};

struct MixedChoice {
  std::array<std::int64_t, 4>
      kernels;                  // rows of configs.def: gate_up FP8, BF16, down FP8, BF16; any number for none
  std::array<float, 6> gating;  // as Choice has it
};

/// The choice that was remembered for `problem`, if there is one.
std::optional<MixedChoice> recall(MixedProblem const& problem);

/// Remembers `choice` for `problem`.
void remember(MixedProblem const& problem, MixedChoice const& choice);

}  // namespace moe_ext::fused_moe
