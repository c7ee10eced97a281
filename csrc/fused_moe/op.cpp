// The ops: what is given and what is remembered, memory for the rest, and the launches.
#include "fused_moe/op.hpp"

#include "common/cuda_context.hpp"
#include "fused_moe/checks.hpp"
#include "fused_moe/gemm_checks.hpp"
#include "fused_moe/given_or_new.hpp"
#include "fused_moe/workspace_layout.hpp"

namespace moe_ext::fused_moe {
namespace {

using torch::stable::Tensor;

constexpr char const* kOp = "fused_moe";

/// `given` is Python's choice at the first call of a problem, `rule` what it chose by where that holds for others.
Tensor run(Call const& call, std::optional<Choice> const& given, std::optional<Rule> const& rule) {
  Form const form = check_form(call);
  check_value(form.num_tokens > 0, kOp, ": `hidden_states` must have tokens, got none");
  Problem const problem{.num_slots = form.slots(),
                        .num_experts = form.num_experts,
                        .hidden = form.hidden,
                        .intermediate = form.intermediate,
                        .flags = call.flags & ~std::int64_t{kRemember},
                        .w13_scale = form.w13_scale,
                        .w2_scale = form.w2_scale,
                        .w13_bias = call.w13_bias.has_value(),
                        .alpha = call.alpha,
                        .limit = call.limit,
                        .sm_count = form.sm_count};
  std::optional<Choice> const choice = given.has_value() ? given : recall(problem);
  check_value(choice.has_value(), kOp, ": kernels must be given for a problem not met before, got none");
  std::int64_t const shape[] = {form.num_tokens, form.hidden};
  Tensor result = given_or_new(kOp, "out", call.out, shape, aoti_torch_dtype_bfloat16(), form.device);
  bool const one_scale = call.a2_scale.has_value() && form.w2_scale.granularity == Granularity::Tensor;
  bool const apart = leaves_fp8(form, choice->w13_config, one_scale);
  std::int64_t const bytes[] = {
      kWorkspaceAlignment +
      workspace_layout(form.slots(), form.hidden, form.intermediate, form.num_experts, form.fp8, apart)
          .total};
  Tensor const memory =
      given_or_new(kOp, "workspace", call.workspace, bytes, aoti_torch_dtype_uint8(), form.device);
  Layer const layer = check_layer(call, form, *choice, apart, memory, result);
  {
    DeviceGuard const guard(static_cast<torch::stable::accelerator::DeviceIndex>(form.device));
    run_layer(layer, current_stream(form.device));
  }
  if ((call.flags & kRemember) != 0) {
    remember(problem, *choice);
    if (rule.has_value()) {
      remember(problem, *choice, *rule);
    }
  }
  return result;
}

}  // namespace

Tensor fused_moe_launch_with(Tensor const& hidden_states,
                             Tensor const& w13,
                             Tensor const& w2,
                             Tensor const& topk_weights,
                             Tensor const& topk_ids,
                             std::optional<Tensor> const& w13_scale,
                             std::optional<Tensor> const& w2_scale,
                             std::optional<Tensor> const& a1_scale,
                             std::optional<Tensor> const& a2_scale,
                             std::optional<Tensor> const& w13_bias,
                             std::optional<Tensor> const& w2_bias,
                             std::optional<Tensor> const& expert_map,
                             std::optional<Tensor> const& addend,
                             std::optional<Tensor> const& workspace,
                             std::optional<Tensor> const& out,
                             std::int64_t flags,
                             double alpha,
                             double limit,
                             double routed_scale,
                             std::int64_t first_expert) {
  Call const call{hidden_states, w13,      w2,       topk_weights, topk_ids,     w13_scale,   w2_scale,
                  a1_scale,      a2_scale, w13_bias, w2_bias,      expert_map,   addend,      workspace,
                  out,           flags,    alpha,    limit,        routed_scale, first_expert};
  return run(call, std::nullopt, std::nullopt);
}

Tensor fused_moe_launch(Tensor const& hidden_states,
                        Tensor const& w13,
                        Tensor const& w2,
                        Tensor const& topk_weights,
                        Tensor const& topk_ids,
                        std::optional<Tensor> const& w13_scale,
                        std::optional<Tensor> const& w2_scale,
                        std::optional<Tensor> const& workspace,
                        std::optional<Tensor> const& out,
                        std::int64_t flags) {
  return fused_moe_launch_with(hidden_states,
                               w13,
                               w2,
                               topk_weights,
                               topk_ids,
                               w13_scale,
                               w2_scale,
                               std::nullopt,
                               std::nullopt,
                               std::nullopt,
                               std::nullopt,
                               std::nullopt,
                               std::nullopt,
                               workspace,
                               out,
                               flags,
                               0,
                               0,
                               1,
                               0);
}

Tensor fused_moe_configured(Tensor const& hidden_states,
                            Tensor const& w13,
                            Tensor const& w2,
                            Tensor const& topk_weights,
                            Tensor const& topk_ids,
                            std::optional<Tensor> const& w13_scale,
                            std::optional<Tensor> const& w2_scale,
                            std::optional<Tensor> const& a1_scale,
                            std::optional<Tensor> const& a2_scale,
                            std::optional<Tensor> const& w13_bias,
                            std::optional<Tensor> const& w2_bias,
                            std::optional<Tensor> const& expert_map,
                            std::optional<Tensor> const& addend,
                            std::optional<Tensor> const& workspace,
                            std::optional<Tensor> const& out,
                            std::int64_t flags,
                            double alpha,
                            double limit,
                            double routed_scale,
                            std::int64_t first_expert,
                            std::int64_t w13_config,
                            std::int64_t w2_config,
                            std::vector<double> const& gating,
                            std::int64_t table,
                            std::int64_t allowed) {
  Choice choice{.w13_config = w13_config, .w2_config = w2_config, .gating = {}};
  check_value(gating.size() == choice.gating.size(),
              kOp,
              ": `gating` must have ",
              choice.gating.size(),
              " numbers, got ",
              gating.size());
  for (std::size_t i = 0; i < gating.size(); ++i) {
    choice.gating[i] = static_cast<float>(gating[i]);
  }
  Call const call{hidden_states, w13,      w2,       topk_weights, topk_ids,     w13_scale,   w2_scale,
                  a1_scale,      a2_scale, w13_bias, w2_bias,      expert_map,   addend,      workspace,
                  out,           flags,    alpha,    limit,        routed_scale, first_expert};
  return run(call, choice, table < 0 ? std::nullopt : std::optional(Rule{table, allowed}));
}

}  // namespace moe_ext::fused_moe
