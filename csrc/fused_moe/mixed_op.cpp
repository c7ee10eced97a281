// The op of a layer of experts in two precisions: what is given and what is remembered, memory, and the launches.
#include "fused_moe/mixed_op.hpp"

#include "common/cuda_context.hpp"
#include "fused_moe/given_or_new.hpp"
#include "fused_moe/mixed_checks.hpp"
#include "fused_moe/mixed_workspace.hpp"
#include "fused_moe/op.hpp"

namespace moe_ext::fused_moe {
namespace {

using torch::stable::Tensor;

constexpr char const* kOp = "fused_moe_mixed";

std::optional<MixedChoice> choice_of(std::vector<std::int64_t> const& kernels,
                                     std::vector<double> const& gating) {
  if (kernels.empty() && gating.empty()) {
    return std::nullopt;
  }
  MixedChoice choice{};
  check_value(kernels.size() == choice.kernels.size() && gating.size() == choice.gating.size(),
              kOp,
              ": `kernels` and `gating` must have ",
              choice.kernels.size(),
              " and ",
              choice.gating.size(),
              " numbers, got ",
              kernels.size(),
              " and ",
              gating.size());
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    choice.kernels[i] = kernels[i];
  }
  for (std::size_t i = 0; i < gating.size(); ++i) {
    choice.gating[i] = static_cast<float>(gating[i]);
  }
  return choice;
}

}  // namespace

Tensor fused_moe_mixed_launch(Tensor const& hidden_states,
                              Tensor const& topk_weights,
                              Tensor const& topk_ids,
                              Tensor const& places,
                              std::optional<Tensor> const& w13_fp8,
                              std::optional<Tensor> const& w13_bf16,
                              std::optional<Tensor> const& w2_fp8,
                              std::optional<Tensor> const& w2_bf16,
                              std::optional<Tensor> const& w13_scale,
                              std::optional<Tensor> const& w2_scale,
                              std::optional<Tensor> const& a1_scale,
                              std::optional<Tensor> const& a2_scale,
                              std::optional<Tensor> const& w13_fp8_bias,
                              std::optional<Tensor> const& w13_bf16_bias,
                              std::optional<Tensor> const& w2_fp8_bias,
                              std::optional<Tensor> const& w2_bf16_bias,
                              std::optional<Tensor> const& expert_map,
                              std::optional<Tensor> const& addend,
                              std::optional<Tensor> const& workspace,
                              std::optional<Tensor> const& out,
                              std::int64_t num_fp8,
                              std::int64_t flags,
                              double alpha,
                              double limit,
                              double routed_scale,
                              std::int64_t first_expert,
                              std::vector<std::int64_t> const& kernels,
                              std::vector<double> const& gating) {
  MixedCall const call{hidden_states,
                       topk_weights,
                       topk_ids,
                       places,
                       num_fp8,
                       {w13_fp8, w13_fp8_bias},
                       {w13_bf16, w13_bf16_bias},
                       {w2_fp8, w2_fp8_bias},
                       {w2_bf16, w2_bf16_bias},
                       w13_scale,
                       w2_scale,
                       a1_scale,
                       a2_scale,
                       expert_map,
                       addend,
                       workspace,
                       out,
                       flags,
                       alpha,
                       limit,
                       routed_scale,
                       first_expert};
  MixedForm const form = check_mixed_form(call);
  Form const& layer_form = form.layer;
  check_value(layer_form.num_tokens > 0, kOp, ": `hidden_states` must have tokens, got none");
  MixedProblem const problem{.num_slots = layer_form.slots(),
                             .parts = form.parts,
                             .hidden = layer_form.hidden,
                             .intermediate = layer_form.intermediate,
                             .flags = flags & ~std::int64_t{kRemember},
                             .w13_scale = layer_form.w13_scale,
                             .w2_scale = layer_form.w2_scale,
                             .w13_bias = w13_fp8_bias.has_value(),
                             .alpha = alpha,
                             .limit = limit,
                             .sm_count = layer_form.sm_count};
  std::optional<MixedChoice> const given = choice_of(kernels, gating);
  std::optional<MixedChoice> const choice = given.has_value() ? given : recall(problem);
  check_value(choice.has_value(), kOp, ": kernels must be given for a problem not met before, got none");
  std::int64_t const shape[] = {layer_form.num_tokens, layer_form.hidden};
  Tensor result = given_or_new(kOp, "out", out, shape, aoti_torch_dtype_bfloat16(), layer_form.device);
  std::int64_t const bytes[] = {mixed_workspace_bytes(layer_form.num_tokens,
                                                      layer_form.top_k,
                                                      layer_form.hidden,
                                                      layer_form.intermediate,
                                                      layer_form.num_experts)};
  Tensor const memory =
      given_or_new(kOp, "workspace", workspace, bytes, aoti_torch_dtype_uint8(), layer_form.device);
  MixedLayer const layer = check_mixed_layer(call, form, *choice, memory, result);
  {
    DeviceGuard const guard(static_cast<torch::stable::accelerator::DeviceIndex>(layer_form.device));
    run_mixed_layer(layer, current_stream(layer_form.device));
  }
  if ((flags & kRemember) != 0) {
    remember(problem, *choice);
  }
  return result;
}

}  // namespace moe_ext::fused_moe
