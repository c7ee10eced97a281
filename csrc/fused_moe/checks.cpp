// From torch tensors to a layer: what is found wrong on the way says what was expected and what came.
#include "fused_moe/checks.hpp"

#include "common/cuda_context.hpp"
#include "common/tensor_checks.hpp"
#include "common/tensor_strides.hpp"
#include "fused_moe/combine_op.hpp"
#include "fused_moe/gather_op.hpp"
#include "fused_moe/gemm_checks.hpp"
#include "fused_moe/op.hpp"
#include "fused_moe/operand_checks.hpp"
#include "fused_moe/sort_and_quantize.hpp"
#include "fused_moe/sort_op.hpp"
#include "fused_moe/workspace.hpp"
#include "fused_moe/workspace_layout.hpp"

namespace moe_ext::fused_moe {
namespace {

constexpr char const* kOp = "fused_moe";

void check_own_workspace(Tensor const& workspace, Form const& form) {
  std::int64_t const bytes = workspace.numel() * static_cast<std::int64_t>(workspace.element_size());
  std::int64_t const needed = workspace_bytes(form.slots(), form.hidden, form.intermediate, form.num_experts);
  check_value(bytes >= needed, kOp, ": `workspace` must have at least ", needed, " bytes, got ", bytes);
}

/// Gate_up reads rows where their tokens are: those of `hidden_states`, or of FP8 as many quantised ones.
void gather_in_gate_up(Layer& layer, Form const& form, WorkspaceParts const& parts) {
  gemm::Params& first = layer.gate_up.params;
  layer.sort.tokens_of_rows = true;
  first.token_of_row = parts.row_slot;
  first.wait = gemm::Wait::ForAll;
  first.programmatic = true;
  GatherParams& tokens = layer.gather;
  if (!form.fp8) {
    layer.gathers = false;
    first.a = tokens.x;
    first.a_row_stride_bytes = tokens.x_row_stride * 2;
    return;
  }
  tokens.row_slot = nullptr;
  tokens.slot_row = nullptr;
  tokens.num_rows = nullptr;
  tokens.top_k = 1;
  tokens.max_rows = static_cast<int>(form.num_tokens);
  // A sort of more than one launch has its scratch where quantised tokens go.
  tokens.beside_previous = sort_scratch_elems(form.slots(), static_cast<int>(form.num_experts)) == 0;
}

}  // namespace

gemm::Gating make_gating(std::array<float, 6> const& numbers, std::int64_t intermediate, std::int64_t flags) {
  bool const interleaved = (flags & kInterleaved) != 0;
  bool const ungated = (flags & kUngated) != 0;
  return {.linear = numbers[0],
          .cubic = numbers[1],
          .quintic = numbers[2],
          .gate_limit = numbers[3],
          .up_limit = numbers[4],
          .up_offset = numbers[5],
          .feature_step = interleaved ? 2 : 1,
          .up_step = ungated ? 0 : (interleaved ? 1 : static_cast<int>(intermediate)),
          .slab_step = interleaved ? 16 : 8,
          .joins = true};
}

Form check_form(Call const& call) {
  Tensor const& x = call.hidden_states;
  check_value(x.is_cuda(), kOp, ": `hidden_states` must be a CUDA tensor, got another kind of device");
  check_dtype(kOp, "hidden_states", x, ScalarType::BFloat16);
  check_rank(kOp, "hidden_states", x, 2);
  check_rank(kOp, "w13", call.w13, 3);
  check_rank(kOp, "w2", call.w2, 3);
  check_rank(kOp, "topk_ids", call.topk_ids, 2);
  int const device = x.get_device_index();
  bool const fp8 = has_dtype(call.w13, ScalarType::Float8_e4m3fn);
  Form form{.num_tokens = x.size(0),
            .top_k = call.topk_ids.size(1),
            .hidden = x.size(1),
            .intermediate = call.w2.size(2),
            .num_experts = call.w2.size(0),
            .fp8 = fp8,
            .w13_scale = {},
            .w2_scale = {},
            .device = device,
            .sm_count = sm_count(device)};
  check_slots(form);
  check_rows_aligned(kOp, "hidden_states", x, x.const_data_ptr());
  check_weights(form, {call.w13, call.w2, call.w13_scale, call.w2_scale}, call.flags);
  return form;
}

Layer check_layer(Call const& call,
                  Form const& form,
                  Choice const& choice,
                  bool apart,
                  Tensor const& workspace,
                  Tensor const& out) {
  std::int64_t const slots = form.slots();
  check_size(kOp, "topk_ids", 0, call.topk_ids.size(0), form.num_tokens);
  check_on_device(kOp, "topk_ids", call.topk_ids, form.device, "hidden_states");
  check_map(call.expert_map, call.first_expert);
  if (call.workspace.has_value()) {
    check_own_workspace(workspace, form);
  }
  check_out(out, form);
  check_addend(call.addend);
  auto const& gate_up =
      kernel_for("w13_config", choice.w13_config, gemm::Output::Gated, form.w13_scale, call.flags);
  auto const& down = kernel_for("w2_config", choice.w2_config, gemm::Output::Rows, form.w2_scale, call.flags);

  bool const on_input = (call.flags & kWeightsOnInput) != 0;
  WorkspaceParts const parts = check_workspace(
      workspace, slots, form.hidden, form.intermediate, form.num_experts, form.fp8, apart, form.device);
  Layer layer{.sort = check_sort(call.topk_ids, form.num_experts, call.expert_map, call.first_expert),
              .gathers = true,
              .gather = parts.gather,
              .gate_up = {},
              .quantizes = form.fp8 && !apart,
              .quantize = parts.quantize,
              .down = {},
              .combine = check_combine(out,
                                       form.top_k,
                                       on_input ? std::nullopt : std::optional(call.topk_weights),
                                       call.addend,
                                       call.routed_scale)};
  layer.sort.offs = parts.offs;
  layer.sort.listed = should_list(form) ? parts.listed : nullptr;
  layer.sort.row_slot = parts.row_slot;
  layer.sort.slot_row = parts.slot_row;
  layer.sort.scratch = parts.sort_scratch;
  check_value(sort_scratch_elems(slots, static_cast<int>(form.num_experts)) <= parts.sort_scratch_elems,
              kOp,
              ": `workspace` must have room for sorting, got less");

  GatherParams& gather = layer.gather;
  gather.x = call.hidden_states.const_data_ptr();
  gather.x_row_stride = step(call.hidden_states, 0);
  gather.num_tokens = form.num_tokens;
  gather.top_k = static_cast<int>(form.top_k);
  set_format(gather, "a1_scale", call.a1_scale, form.w13_scale, form.device);
  if (on_input) {
    set_weights(gather, call.topk_weights, form.device);
  }
  Weights const gate_up_weights{call.w13, call.w13_scale, call.w13_bias, form.w13_scale.n_segments};
  layer.gate_up = make_gemm(gate_up, gate_up_weights, form, gather, parts.intermediate);
  gemm::Params& first = layer.gate_up.params;
  first.gating = make_gating(choice.gating, form.intermediate, call.flags);
  first.n = 2 * form.intermediate;  // without up rows each gate row serves as both
  first.out_row_stride = form.intermediate;
  if (!on_input && can_gather(gate_up.config, form, gather) && should_gather(gate_up.config, form)) {
    gather_in_gate_up(layer, form, parts);
  }

  GatherParams& quantize = layer.quantize;
  set_format(quantize, "a2_scale", call.a2_scale, form.w2_scale, form.device);
  if (!form.fp8) {  // the down GEMM reads the intermediate as it is
    quantize.out = parts.intermediate;
    quantize.out_row_stride = form.intermediate;
  }
  if (apart) {
    first.quantised = {.values = static_cast<unsigned char*>(quantize.out),
                       .row_stride = quantize.out_row_stride,
                       .scale = quantize.scale,
                       .scale_row_stride = quantize.scale_row_stride,
                       .static_scale = quantize.static_scale};
  }
  check_value(down.config.output == gemm::Output::Rows || form.hidden % 16 == 0,
              kOp,
              ": `w2_config` must be a kernel of rows for a hidden size that is no multiple of 16, got ",
              down.config.id);
  Weights const down_weights{call.w2, call.w2_scale, call.w2_bias, 1};
  layer.down = make_gemm(down, down_weights, form, quantize, parts.rows);

  layer.combine.y = parts.rows;
  layer.combine.num_rows = slots;
  layer.combine.slot_row = parts.slot_row;
  layer.combine.programmatic = true;
  layer.combine.only_y_is_new = true;
  layer.sorts_beside_tokens = layer.gathers && can_sort_and_quantize(layer.sort, layer.gather);
  if (layer.sorts_beside_tokens) {
    layer.gather.beside_previous = false;
  }
  for (gemm::Params* const params : {&layer.gate_up.params, &layer.down.params}) {
    params->groups.offs = parts.offs;
    params->groups.listed = layer.sort.listed;
  }
  return layer;
}

}  // namespace moe_ext::fused_moe
