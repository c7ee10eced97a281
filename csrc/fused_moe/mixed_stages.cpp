// From a checked form to the launches of a layer of experts in two precisions.
#include <initializer_list>

#include "common/tensor_checks.hpp"
#include "common/tensor_strides.hpp"
#include "fused_moe/combine_op.hpp"
#include "fused_moe/gather_op.hpp"
#include "fused_moe/gemm_checks.hpp"
#include "fused_moe/mixed_checks.hpp"
#include "fused_moe/mixed_memory.hpp"
#include "fused_moe/mixed_order.hpp"
#include "fused_moe/mixed_workspace.hpp"
#include "fused_moe/op.hpp"
#include "fused_moe/operand_checks.hpp"
#include "fused_moe/sort_and_quantize.hpp"
#include "fused_moe/sort_op.hpp"
#include "fused_moe/workspace.hpp"
#include "fused_moe/workspace_layout.hpp"

namespace moe_ext::fused_moe {
namespace {

constexpr char const* kOp = "fused_moe_mixed";

/// The first GEMM that there is waits as it has to, the others beside it.
void wait_in_turn(std::initializer_list<std::optional<LayerGemm>*> gemms, gemm::Wait wait) {
  for (std::optional<LayerGemm>* const gemm : gemms) {
    if (gemm->has_value()) {
      (*gemm)->params.wait = wait;
      (*gemm)->params.programmatic = true;
      wait = gemm::Wait::AtEnd;
    }
  }
}

/// Makes the stages, one after the other.
class Stages {
 public:
  Stages(MixedCall const& call, MixedForm const& form, MixedChoice const& choice, MixedMemory const& memory)
      : call_(call),
        form_(form.layer),
        parts_(form.parts),
        choice_(choice),
        memory_(memory),
        on_input_((call.flags & kWeightsOnInput) != 0) {}

  void add_gate_up(MixedLayer& layer) {
    PlaceRange const fp8 = fp8_gate_up(parts_);
    PlaceRange const bf16 = bf16_gate_up(parts_);
    if (fp8.count > 0) {
      add_fp8_gate_up(layer, fp8);
    }
    if (bf16.count > 0) {
      add_bf16_gate_up(layer, bf16);
    }
    // A row that one of the GEMMs finds by its token is not to be found by its slot.
    for (std::optional<GatherParams>* const stage : {&layer.quantised_rows, &layer.copied_rows}) {
      if (layer.sort.tokens_of_rows && stage->has_value()) {
        (*stage)->top_k = 1;
      }
    }
    // Tokens are quantised beside the sort, so a GEMM right behind must wait before it reads offsets.
    bool const sorted = layer.copied_rows.has_value() ||
                        (layer.quantised_rows.has_value() && !layer.quantised_rows->beside_previous);
    gemm::Wait const wait = sorted ? gemm::Wait::ForTokens : gemm::Wait::ForAll;
    bool const both = fp8.count > 0 && bf16.count > 0;
    layer.bf16_gate_up_first = both && bf16_gate_up_first(load_of(bf16));
    if (layer.bf16_gate_up_first) {
      wait_in_turn({&layer.bf16_gate_up, &layer.fp8_gate_up}, wait);
    } else {
      if (both) {
        leave_room(*layer.fp8_gate_up, bf16);
      }
      wait_in_turn({&layer.fp8_gate_up, &layer.bf16_gate_up}, wait);
    }
  }

  void add_down(MixedLayer& layer) {
    PlaceRange const bf16 = bf16_down(parts_);
    if (bf16.count > 0) {
      GatherParams stage = inner_rows(form_.num_experts);
      stage.out = memory_.intermediate;
      stage.out_row_stride = form_.intermediate;
      Form const form = of_precision(bf16.count, false);
      layer.bf16_down = of_range(make_down(3, call_.w2_bf16, form, {}, std::nullopt, stage), bf16);
    }
    auto const fp8 = fp8_down(parts_);
    if (fp8[0].count + fp8[1].count > 0) {
      GatherParams stage = inner_rows(form_.num_experts);
      set_format(stage, "a2_scale", call_.a2_scale, form_.w2_scale, form_.device);
      Form const form = of_precision(fp8[0].count + fp8[1].count, true);
      LayerGemm const gemm = make_down(2, call_.w2_fp8, form, form_.w2_scale, call_.w2_scale, stage);
      for (std::size_t i = 0; i < fp8.size(); ++i) {
        if (fp8[i].count > 0) {
          layer.fp8_down[i] = of_range(gemm, fp8[i]);
          if (bf16.count > 0) {
            leave_room(*layer.fp8_down[i], bf16);
          }
        }
      }
      layer.bf16_down_first = bf16.count > 0 && bf16_down_first(load_of(bf16));
      add_quantisation(layer, stage);
    }
    if (layer.bf16_down_first) {
      bool const quantises = layer.quantize[0].has_value() || layer.quantize[1].has_value();
      wait_in_turn({&layer.bf16_down}, gemm::Wait::ForTokens);
      wait_in_turn({&layer.fp8_down[0], &layer.fp8_down[1]},
                   quantises ? gemm::Wait::ForTokens : gemm::Wait::AtEnd);
    } else {
      wait_in_turn({&layer.fp8_down[0], &layer.fp8_down[1], &layer.bf16_down}, gemm::Wait::ForTokens);
    }
  }

 private:
  /// The form of the experts with a stage in one precision.
  Form of_precision(std::int64_t count, bool fp8) const {
    Form form = form_;
    form.num_experts = count;
    form.fp8 = fp8;
    return form;
  }

  /// The end of the rows of so many places.
  int const* end_of(std::int64_t places) const {
    return memory_.offs + places - 1;
  }

  /// hidden_states, the rows of so many places, to where gate_up reads them.
  GatherParams hidden_rows(std::int64_t places) const {
    GatherParams stage = make_stage(end_of(places), form_.slots(), form_.hidden);
    stage.x = call_.hidden_states.const_data_ptr();
    stage.x_row_stride = step(call_.hidden_states, 0);
    stage.num_tokens = form_.num_tokens;
    stage.top_k = static_cast<int>(form_.top_k);
    stage.row_slot = memory_.row_slot;
    stage.out = memory_.rows;
    if (on_input_) {
      set_weights(stage, call_.topk_weights, form_.device);
    }
    return stage;
  }

  MixedLoad load_of(PlaceRange bf16) const {
    return {form_.slots(), form_.num_experts, bf16.count};
  }

  void leave_room(LayerGemm& fp8, PlaceRange bf16) const {
    fp8.params.spared_ctas = spared_ctas(load_of(bf16), fp8.kernel->config, form_.sm_count);
  }

  /// The intermediate, the rows of so many places, quantised: apart where it is short, or in its own place.
  GatherParams inner_rows(std::int64_t places) const {
    GatherParams stage = make_stage(end_of(places), form_.slots(), form_.intermediate);
    stage.x = memory_.intermediate;
    if (form_.slots() <= kMostSlotsApart) {
      stage.out = memory_.quantised;
      stage.out_row_stride = fp8_row_bytes(form_.intermediate);
      stage.scale = memory_.quantised_scale;
      stage.scale_row_stride = scale_row_bytes(form_.intermediate) / 4;
    } else {
      stage.out = memory_.intermediate;
      stage.out_row_stride = 2 * form_.intermediate;
      stage.scale = reinterpret_cast<float*>(memory_.intermediate + form_.intermediate);
      stage.scale_row_stride = form_.intermediate / 2;
    }
    stage.dependents_first = true;
    stage.counted_before = true;
    return stage;
  }

  bool gathers(gemm::RegisteredKernel const& kernel, bool fp8, GatherParams const& stage) const {
    Form const form = of_precision(form_.num_experts, fp8);
    return !on_input_ && can_gather(kernel.config, form, stage) && should_gather(kernel.config, form);
  }

  void add_fp8_gate_up(MixedLayer& layer, PlaceRange range) {
    auto const& kernel =
        kernel_for("w13_fp8", choice_.kernels[0], gemm::Output::Gated, form_.w13_scale, call_.flags);
    GatherParams stage = hidden_rows(range.count);
    stage.out_row_stride = 2 * form_.hidden;
    stage.scale = reinterpret_cast<float*>(memory_.rows + form_.hidden);
    stage.scale_row_stride = form_.hidden / 2;
    bool const by_token = gathers(kernel, true, stage);
    if (by_token) {
      stage.row_slot = nullptr;
      stage.num_rows = nullptr;
      stage.top_k = 1;
      stage.max_rows = static_cast<int>(form_.num_tokens);
      stage.out = memory_.tokens;
      stage.out_row_stride = fp8_row_bytes(form_.hidden);
      stage.scale = memory_.token_scale;
      stage.scale_row_stride = scale_row_bytes(form_.hidden) / 4;
      stage.beside_previous = true;  // the sort has its scratch elsewhere
    }
    set_format(stage, "a1_scale", call_.a1_scale, form_.w13_scale, form_.device);
    LayerGemm gemm =
        make_gate_up(kernel, call_.w13_fp8, of_precision(range.count, true), call_.w13_scale, stage);
    if (by_token) {
      find_rows(layer, gemm.params);
    }
    layer.quantised_rows = stage;
    layer.fp8_gate_up = of_range(gemm, range);
  }

  void add_bf16_gate_up(MixedLayer& layer, PlaceRange range) {
    auto const& kernel = kernel_for("w13_bf16", choice_.kernels[1], gemm::Output::Gated, {}, call_.flags);
    GatherParams stage = hidden_rows(form_.num_experts);
    stage.first_row = range.place > 0 ? end_of(range.place) : nullptr;
    LayerGemm gemm =
        make_gate_up(kernel, call_.w13_bf16, of_precision(range.count, false), std::nullopt, stage);
    if (gathers(kernel, false, stage)) {
      find_rows(layer, gemm.params);
      gemm.params.a = stage.x;
      gemm.params.a_row_stride_bytes = stage.x_row_stride * 2;
    } else {
      layer.copied_rows = stage;
    }
    layer.bf16_gate_up = of_range(gemm, range);
  }

  void find_rows(MixedLayer& layer, gemm::Params& params) const {
    layer.sort.tokens_of_rows = true;
    params.token_of_row = memory_.row_slot;
  }

  LayerGemm make_gate_up(gemm::RegisteredKernel const& kernel,
                         MixedWeights const& weights,
                         Form const& form,
                         std::optional<Tensor> const& scale,
                         GatherParams const& stage) const {
    Weights const own{*weights.weight, scale, weights.bias, form.fp8 ? form_.w13_scale.n_segments : 1};
    LayerGemm gemm = make_gemm(kernel, own, form, stage, memory_.intermediate);
    gemm.params.gating = make_gating(choice_.gating, form_.intermediate, call_.flags);
    gemm.params.n = 2 * form_.intermediate;  // without up rows each gate row serves as both
    gemm.params.out_row_stride = form_.intermediate;
    return gemm;
  }

  LayerGemm make_down(std::size_t index,
                      MixedWeights const& weights,
                      Form const& form,
                      WeightScale layout,
                      std::optional<Tensor> const& scale,
                      GatherParams const& stage) const {
    char const* const argument = form.fp8 ? "w2_fp8" : "w2_bf16";
    auto const& kernel =
        kernel_for(argument, choice_.kernels[index], gemm::Output::Rows, layout, call_.flags);
    check_value(kernel.config.output == gemm::Output::Rows || form_.hidden % 16 == 0,
                kOp,
                ": `",
                argument,
                "` must have a kernel of rows for a hidden size that is no multiple of 16, got ",
                kernel.config.id);
    return make_gemm(kernel, {*weights.weight, scale, weights.bias, 1}, form, stage, memory_.rows);
  }

  /// What turns the intermediate of experts with down in FP8 into that; gate_up itself where it can and none of its
  /// rows are to stay as they are.
  void add_quantisation(MixedLayer& layer, GatherParams const& all) {
    check_value(form_.intermediate <= kMostColumnsInPlace,
                kOp,
                ": the intermediate size must be at most ",
                kMostColumnsInPlace,
                " where `w2_fp8` is given, got ",
                form_.intermediate);
    bool const alone = bf16_down(parts_).count == 0;
    bool const leaves =
        parts_.both_fp8 > 0 && parts_.gate_up_fp8 == 0 &&
        can_quantise(layer.fp8_gate_up->kernel->config, form_, all.format == GatherFormat::StaticScale);
    if (leaves) {
      layer.fp8_gate_up->params.quantised = {.values = static_cast<unsigned char*>(all.out),
                                             .row_stride = all.out_row_stride,
                                             .scale = all.scale,
                                             .scale_row_stride = all.scale_row_stride,
                                             .static_scale = all.static_scale};
    } else if (parts_.both_fp8 > 0) {
      layer.quantize[0] = all;
      layer.quantize[0]->num_rows = end_of(alone ? form_.num_experts : parts_.both_fp8);
    }
    if (parts_.down_fp8 > 0 && (leaves || !alone || parts_.both_fp8 == 0)) {
      layer.quantize[1] = all;
      std::int64_t const before = form_.num_experts - parts_.down_fp8;
      layer.quantize[1]->first_row = before > 0 ? end_of(before) : nullptr;
    }
    for (std::optional<GatherParams>& stage : layer.quantize) {
      if (stage.has_value()) {
        stage->beside_previous = layer.bf16_down_first;
      }
    }
  }

  /// Of a GEMM of all experts with a stage in one precision, those of a range.
  LayerGemm of_range(LayerGemm gemm, PlaceRange range) const {
    gemm::Params& params = gemm.params;
    params.b = static_cast<unsigned char const*>(params.b) + range.slot * params.b_group_stride_bytes;
    if (params.scale_b.data != nullptr) {
      params.scale_b.data += range.slot * params.scale_b.group_stride;
    }
    if (params.bias.data != nullptr) {
      std::int64_t const bytes = params.bias.dtype == gemm::OutDtype::FP32 ? 4 : 2;
      params.bias.data =
          static_cast<unsigned char const*>(params.bias.data) + range.slot * params.bias.group_stride * bytes;
    }
    params.groups.offs = memory_.offs + range.place;
    params.groups.num_groups = static_cast<int>(range.count);
    params.groups.continues = range.place > 0;
    params.groups.listed = should_list(form_) ? memory_.listed : nullptr;
    params.groups.first_listed = static_cast<int>(range.place);
    params.expected_rows = ceil_div(form_.slots() * range.count, form_.num_experts);
    return gemm;
  }

  MixedCall const& call_;
  Form const& form_;
  MixedParts const& parts_;
  MixedChoice const& choice_;
  MixedMemory const& memory_;
  bool on_input_;
};

}  // namespace

MixedLayer check_mixed_layer(MixedCall const& call,
                             MixedForm const& form,
                             MixedChoice const& choice,
                             Tensor const& workspace,
                             Tensor const& out) {
  Form const& layer_form = form.layer;
  check_size(kOp, "topk_ids", 0, call.topk_ids.size(0), layer_form.num_tokens);
  check_on_device(kOp, "topk_ids", call.topk_ids, layer_form.device, "hidden_states");
  check_map(call.expert_map, call.first_expert);
  check_out(out, layer_form);
  check_addend(call.addend);
  MixedMemory const memory = check_memory(workspace, layer_form);
  bool const on_input = (call.flags & kWeightsOnInput) != 0;
  MixedLayer layer{
      .sort = check_sort(call.topk_ids, layer_form.num_experts, call.expert_map, call.first_expert),
      .quantised_rows = std::nullopt,
      .copied_rows = std::nullopt,
      .fp8_gate_up = std::nullopt,
      .bf16_gate_up = std::nullopt,
      .bf16_gate_up_first = false,
      .quantize = {},
      .fp8_down = {},
      .bf16_down = std::nullopt,
      .bf16_down_first = false,
      .combine = check_combine(out,
                               layer_form.top_k,
                               on_input ? std::nullopt : std::optional(call.topk_weights),
                               call.addend,
                               call.routed_scale)};
  layer.sort.places = check_expert_ints(kOp, "places", call.places, layer_form);
  layer.sort.offs = memory.offs;
  layer.sort.listed = should_list(layer_form) ? memory.listed : nullptr;
  layer.sort.row_slot = memory.row_slot;
  layer.sort.slot_row = memory.slot_row;
  layer.sort.scratch = reinterpret_cast<int*>(memory.rows);
  Stages stages(call, form, choice, memory);
  stages.add_gate_up(layer);
  stages.add_down(layer);
  layer.sorts_beside_tokens =
      layer.quantised_rows.has_value() && can_sort_and_quantize(layer.sort, *layer.quantised_rows);
  if (layer.sorts_beside_tokens) {
    layer.quantised_rows->beside_previous = false;
  }
  layer.combine.y = memory.rows;
  layer.combine.num_rows = layer_form.slots();
  layer.combine.slot_row = memory.slot_row;
  layer.combine.programmatic = true;
  layer.combine.only_y_is_new = true;
  return layer;
}

}  // namespace moe_ext::fused_moe
