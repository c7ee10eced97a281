// The op: checks, then the launches.
#include "fused_moe/masked_op.hpp"

#include "common/cuda_context.hpp"
#include "fused_moe/masked_checks.hpp"

namespace moe_ext::fused_moe {

using torch::stable::Tensor;

void fused_moe_masked_configured(Tensor const& hidden_states,
                                 Tensor const& w13,
                                 Tensor const& w2,
                                 Tensor const& counts,
                                 std::optional<Tensor> const& w13_scale,
                                 std::optional<Tensor> const& w2_scale,
                                 std::optional<Tensor> const& a1_scale,
                                 std::optional<Tensor> const& a2_scale,
                                 std::optional<Tensor> const& w13_bias,
                                 std::optional<Tensor> const& w2_bias,
                                 Tensor const& intermediate,
                                 std::optional<Tensor> const& quantised,
                                 std::optional<Tensor> const& scale,
                                 Tensor const& out,
                                 std::int64_t flags,
                                 std::int64_t w13_config,
                                 std::int64_t w2_config,
                                 std::vector<double> const& gating) {
  Choice choice{};
  choice.w13_config = w13_config;
  choice.w2_config = w2_config;
  check_value(gating.size() == choice.gating.size(),
              "fused_moe_masked: `gating` must have ",
              choice.gating.size(),
              " numbers, got ",
              gating.size());
  for (std::size_t i = 0; i < gating.size(); ++i) {
    choice.gating[i] = static_cast<float>(gating[i]);
  }
  MaskedCall const call{.hidden_states = hidden_states,
                        .experts = {w13, w2, w13_scale, w2_scale},
                        .counts = counts,
                        .a1_scale = a1_scale,
                        .a2_scale = a2_scale,
                        .w13_bias = w13_bias,
                        .w2_bias = w2_bias,
                        .intermediate = intermediate,
                        .quantised = quantised,
                        .scale = scale,
                        .out = out,
                        .flags = flags};
  Form const form = check_masked_form(call);
  MaskedLayer const layer = check_masked_layer(call, form, choice);
  if (form.num_tokens == 0) {
    return;
  }
  DeviceGuard const guard(static_cast<torch::stable::accelerator::DeviceIndex>(form.device));
  run_masked_layer(layer, current_stream(form.device));
}

}  // namespace moe_ext::fused_moe
