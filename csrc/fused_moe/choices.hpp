// What Python chose for a layer, remembered by problem, so that a further call need not ask; and what it chose by, so
// that neither need one with another number of tokens.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

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

/// How Python chooses for problems that differ in their number of slots alone.
struct Rule {
  std::int64_t table;    // a number that fused_moe_teach was told
  std::int64_t allowed;  // a bit for each of its choices
};

/// The choice that was remembered for `problem`, or is made by the rule that was, if there is either.
std::optional<Choice> recall(Problem const& problem);

/// Remembers `choice` for `problem`.
void remember(Problem const& problem, Choice const& choice);

/// Remembers `rule`, and the gating of `choice`, for `problem` with any number of slots.
void remember(Problem const& problem, Choice const& choice, Rule const& rule);

/// The C++ side of torch.ops.moe_ext.fused_moe_teach: a table of measured choices by a number, as
/// grouped_gemm::MeasuredChoices takes it. `choices` are pairs of kernels; `costs` those of `costly` kernels one after
/// another; `problems` have four sizes each and a time for each choice.
void fused_moe_teach(std::int64_t number,
                     std::vector<std::int64_t> const& choices,
                     std::vector<std::int64_t> const& costly,
                     std::vector<double> const& costs,
                     std::vector<double> const& common,
                     std::vector<double> const& problems,
                     std::int64_t sm_count,
                     double radius,
                     double shrink);

}  // namespace moe_ext::fused_moe
