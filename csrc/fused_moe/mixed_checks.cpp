// From torch tensors to the form of a layer of experts in two precisions.
#include "fused_moe/mixed_checks.hpp"

#include "common/cuda_context.hpp"
#include "common/tensor_checks.hpp"
#include "fused_moe/operand_checks.hpp"
#include "fused_moe/sort.hpp"

namespace moe_ext::fused_moe {
namespace {

constexpr char const* kOp = "fused_moe_mixed";

std::int64_t count_of(char const* argument, std::optional<Tensor> const& weight) {
  if (!weight.has_value()) {
    return 0;
  }
  check_rank(kOp, argument, *weight, 3);
  check_value(weight->size(0) > 0, kOp, ": `", argument, "` must be absent or have experts, got none");
  return weight->size(0);
}

MixedParts check_parts(MixedCall const& call) {
  std::int64_t const gate_up_fp8 = count_of("w13_fp8", call.w13_fp8.weight);
  std::int64_t const gate_up_bf16 = count_of("w13_bf16", call.w13_bf16.weight);
  std::int64_t const down_fp8 = count_of("w2_fp8", call.w2_fp8.weight);
  std::int64_t const down_bf16 = count_of("w2_bf16", call.w2_bf16.weight);
  std::int64_t const experts = gate_up_fp8 + gate_up_bf16;
  check_value(experts >= 1 && experts <= kMaxExperts && down_fp8 + down_bf16 == experts,
              kOp,
              ": both stages must have 1 to ",
              kMaxExperts,
              " experts and as many, got ",
              experts,
              " and ",
              down_fp8 + down_bf16);
  MixedParts const parts{.both_fp8 = call.num_fp8,
                         .gate_up_fp8 = gate_up_fp8 - call.num_fp8,
                         .both_bf16 = down_bf16 - (gate_up_fp8 - call.num_fp8),
                         .down_fp8 = down_fp8 - call.num_fp8};
  check_value(parts.both_fp8 >= 0 && parts.gate_up_fp8 >= 0 && parts.both_bf16 >= 0 && parts.down_fp8 >= 0,
              kOp,
              ": `num_fp8` must be how many experts have both stages in FP8, got ",
              call.num_fp8);
  return parts;
}

/// Of one stage, in either precision.
WeightScale check_stage(char const* fp8_argument,
                        char const* bf16_argument,
                        char const* scale_argument,
                        MixedWeights const& fp8,
                        MixedWeights const& bf16,
                        std::optional<Tensor> const& scale,
                        Form form,
                        std::int64_t n,
                        std::int64_t k) {
  if (bf16.weight.has_value()) {
    form.num_experts = bf16.weight->size(0);
    form.fp8 = false;
    check_weight(bf16_argument, *bf16.weight, form, n, k);
  }
  check_value(fp8.weight.has_value() == scale.has_value(),
              kOp,
              ": `",
              scale_argument,
              "` must be given for float8_e4m3fn weights and only then, got the other");
  if (!fp8.weight.has_value()) {
    return {};
  }
  form.num_experts = fp8.weight->size(0);
  form.fp8 = true;
  check_weight(fp8_argument, *fp8.weight, form, n, k);
  return check_weight_scale(scale_argument, scale, *fp8.weight, true);
}

}  // namespace

MixedForm check_mixed_form(MixedCall const& call) {
  Tensor const& x = call.hidden_states;
  check_value(x.is_cuda(), kOp, ": `hidden_states` must be a CUDA tensor, got another kind of device");
  check_dtype(kOp, "hidden_states", x, ScalarType::BFloat16);
  check_rank(kOp, "hidden_states", x, 2);
  check_rank(kOp, "topk_ids", call.topk_ids, 2);
  MixedParts const parts = check_parts(call);
  Tensor const& w2 = call.w2_fp8.weight.has_value() ? *call.w2_fp8.weight : *call.w2_bf16.weight;
  int const device = x.get_device_index();
  Form form{.num_tokens = x.size(0),
            .top_k = call.topk_ids.size(1),
            .hidden = x.size(1),
            .intermediate = w2.size(2),
            .num_experts = count_all(parts),
            .fp8 = true,
            .w13_scale = {},
            .w2_scale = {},
            .device = device,
            .sm_count = sm_count(device)};
  check_slots(form);
  check_rows_aligned(kOp, "hidden_states", x, x.const_data_ptr());
  check_sizes(form, call.flags);
  form.w13_scale = check_stage("w13_fp8",
                               "w13_bf16",
                               "w13_scale",
                               call.w13_fp8,
                               call.w13_bf16,
                               call.w13_scale,
                               form,
                               first_rows(form, call.flags),
                               form.hidden);
  form.w2_scale = check_stage("w2_fp8",
                              "w2_bf16",
                              "w2_scale",
                              call.w2_fp8,
                              call.w2_bf16,
                              call.w2_scale,
                              form,
                              form.hidden,
                              form.intermediate);
  check_layouts(form, call.flags);
  return {.layer = form, .parts = parts};
}

}  // namespace moe_ext::fused_moe
