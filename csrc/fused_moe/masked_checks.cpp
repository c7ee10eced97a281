// From torch tensors to a masked layer: what is found wrong on the way says what was expected and what came.
#include "fused_moe/masked_checks.hpp"

#include <algorithm>
#include <limits>

#include "common/cuda_context.hpp"
#include "common/math.hpp"
#include "common/tensor_checks.hpp"
#include "common/tensor_strides.hpp"
#include "fused_moe/gemm_checks.hpp"
#include "fused_moe/operand_checks.hpp"
#include "fused_moe/workspace_layout.hpp"

namespace moe_ext::fused_moe {
namespace {

constexpr char const* kOp = "fused_moe_masked";
/// Blocks of 128 values, which kernels that quantise count in 32 bits: MAX_BLOCKS of
/// python/moe_ext/_fused_moe_masked_checks.py.
constexpr std::int64_t kMostBlocks = std::numeric_limits<int>::max() - (1 << 16);

std::int64_t blocks_of(std::int64_t columns) {
  return ceil_div(columns, gemm::kScaleBlock);
}

/// Elements from row to row: GEMMs see the buffers of all experts as one matrix.
std::int64_t row_stride(char const* argument, Tensor const& tensor) {
  std::int64_t const experts = tensor.size(0);
  std::int64_t const rows = tensor.size(1);
  check_value(experts <= 1 || rows <= 1 || tensor.stride(0) == rows * tensor.stride(1),
              kOp,
              ": `",
              argument,
              "` must have experts that follow each other without a gap, got strides ",
              tensor.stride(0),
              " and ",
              tensor.stride(1),
              " for ",
              rows,
              " rows an expert");
  if (rows > 1) {
    return tensor.stride(1);
  }
  return experts > 1 ? tensor.stride(0) : tensor.size(2);
}

/// Scratch of at least `elements` that begins at a multiple of 16 bytes.
void* check_scratch(
    char const* argument, Tensor const& tensor, ScalarType dtype, std::int64_t elements, int device) {
  check_on_device(kOp, argument, tensor, device, "hidden_states");
  check_dtype(kOp, argument, tensor, dtype);
  check_value(tensor.is_contiguous(), kOp, ": `", argument, "` must be contiguous, got other strides");
  check_value(tensor.numel() >= elements,
              kOp,
              ": `",
              argument,
              "` must have at least ",
              elements,
              " elements, got ",
              tensor.numel());
  void* const data = tensor.mutable_data_ptr();
  check_value(reinterpret_cast<std::uintptr_t>(data) % 16 == 0,
              kOp,
              ": `",
              argument,
              "` must begin at a multiple of 16 bytes, got another address");
  return data;
}

void check_out(Tensor const& out, Tensor const& x, int device) {
  check_on_device(kOp, "out", out, device, "hidden_states");
  check_dtype(kOp, "out", out, ScalarType::BFloat16);
  check_rank(kOp, "out", out, 3);
  for (std::int64_t dim = 0; dim < 3; ++dim) {
    check_size(kOp, "out", dim, out.size(dim), x.size(dim));
  }
  check_rows_aligned(kOp, "out", out, out.const_data_ptr());
}

/// Where rows of `columns` values lie once they are quantised, as the GEMM behind that reads them.
GatherParams make_stage(MaskedCall const& call,
                        Form const& form,
                        std::int64_t columns,
                        char const* argument,
                        std::optional<Tensor> const& given,
                        WeightScale weight_scale) {
  GatherParams stage{};
  set_format(stage, argument, given, weight_scale, form.device);
  if (form.fp8) {
    std::int64_t const widest = std::max(form.hidden, form.intermediate);
    stage.out = check_scratch("quantised",
                              *call.quantised,
                              ScalarType::Float8_e4m3fn,
                              form.num_tokens * fp8_row_bytes(widest),
                              form.device);
    stage.out_row_stride = fp8_row_bytes(columns);
    stage.scale = static_cast<float*>(check_scratch(
        "scale", *call.scale, ScalarType::Float, form.num_tokens * blocks_of(widest), form.device));
    stage.scale_row_stride = stage.format == GatherFormat::RowBlocks ? blocks_of(columns) : 1;
  }
  return stage;
}

quantize::Granularity granularity_of(GatherFormat format) {
  if (format == GatherFormat::RowBlocks) {
    return quantize::Granularity::RowBlock;
  }
  return format == GatherFormat::StaticScale ? quantize::Granularity::Tensor : quantize::Granularity::Row;
}

/// The first rows of each expert's buffer at `x` to what `stage` says.
quantize::Params quantisation(GatherParams const& stage,
                              void const* x,
                              std::int64_t x_row_stride,
                              std::int64_t columns,
                              gemm::GroupRows const& groups) {
  bool const given = stage.format == GatherFormat::StaticScale;
  std::int64_t const rows = groups.max_rows;
  return {.x = x,
          .q = static_cast<std::uint8_t*>(stage.out),
          .scale = stage.scale,
          .static_scale = stage.static_scale,
          .partials = nullptr,
          .num_valid_rows = groups.offs,
          .type = InputType::BF16,
          .granularity = granularity_of(stage.format),
          .power_of_two = false,
          .groups = groups.num_groups,
          .rows = groups.max_rows,
          .k = static_cast<int>(columns),
          .partials_per_group = 0,
          .x_group_stride = rows * x_row_stride,
          .x_row_stride = x_row_stride,
          .q_group_stride = rows * stage.out_row_stride,
          .q_row_stride = stage.out_row_stride,
          .scale_group_stride = given ? 1 : rows * stage.scale_row_stride,  // a copy for each group
          .scale_row_stride = stage.scale_row_stride,
          .scale_column_stride = 1,
          .static_scale_stride = 0,
          .count_stride = 1};
}

}  // namespace

Form check_masked_form(MaskedCall const& call) {
  Tensor const& x = call.hidden_states;
  Tensor const& w13 = call.experts.w13;
  Tensor const& w2 = call.experts.w2;
  check_value(x.is_cuda(), kOp, ": `hidden_states` must be a CUDA tensor, got another kind of device");
  check_dtype(kOp, "hidden_states", x, ScalarType::BFloat16);
  check_rank(kOp, "hidden_states", x, 3);
  check_rank(kOp, "w13", w13, 3);
  check_rank(kOp, "w2", w2, 3);
  int const device = x.get_device_index();
  Form form{.num_tokens = x.size(0) * x.size(1),
            .top_k = 1,
            .hidden = x.size(2),
            .intermediate = w2.size(2),
            .num_experts = w2.size(0),
            .fp8 = has_dtype(w13, ScalarType::Float8_e4m3fn),
            .w13_scale = {},
            .w2_scale = {},
            .device = device,
            .sm_count = sm_count(device)};
  check_value(form.num_experts >= 1 && form.num_experts <= kMaxExperts,
              kOp,
              ": `w2` must have 1 to ",
              kMaxExperts,
              " experts, got ",
              form.num_experts);
  check_size(kOp, "hidden_states", 0, x.size(0), form.num_experts);
  check_rows_aligned(kOp, "hidden_states", x, x.const_data_ptr());
  check_weights(form, call.experts, call.flags);
  std::int64_t const blocks = blocks_of(std::max(form.hidden, form.intermediate));
  check_value(x.size(1) <= kMostBlocks / blocks / form.num_experts,
              kOp,
              ": `hidden_states` and the intermediate must have at most ",
              kMostBlocks,
              " blocks of 128 values, got ",
              form.num_tokens,
              " rows of ",
              blocks);
  return form;
}

MaskedLayer check_masked_layer(MaskedCall const& call, Form const& form, Choice const& choice) {
  Tensor const& x = call.hidden_states;
  Tensor const& out = call.out;
  check_out(out, x, form.device);
  check_value(
      call.quantised.has_value() == form.fp8 && call.scale.has_value() == form.fp8,
      kOp,
      ": `quantised` and `scale` must be given for float8_e4m3fn weights and only then, got the other");
  auto const& gate_up =
      kernel_for("w13_config", choice.w13_config, gemm::Output::Gated, form.w13_scale, call.flags);
  auto const& down = kernel_for("w2_config", choice.w2_config, gemm::Output::Rows, form.w2_scale, call.flags);
  check_value(down.config.output == gemm::Output::Rows || form.hidden % 16 == 0,
              kOp,
              ": `w2_config` must be a kernel of rows for a hidden size that is no multiple of 16, got ",
              down.config.id);

  gemm::GroupRows const groups{.offs = check_expert_ints(kOp, "counts", call.counts, form),
                               .num_groups = static_cast<int>(form.num_experts),
                               .num_rows = static_cast<int>(form.num_tokens),
                               .max_rows = static_cast<int>(x.size(1))};
  std::int64_t const x_row_stride = row_stride("hidden_states", x);
  std::int64_t const out_row_stride = row_stride("out", out);
  void* const intermediate = check_scratch("intermediate",
                                           call.intermediate,
                                           ScalarType::BFloat16,
                                           form.num_tokens * form.intermediate,
                                           form.device);

  GatherParams rows = make_stage(call, form, form.hidden, "a1_scale", call.a1_scale, form.w13_scale);
  GatherParams inner = make_stage(call, form, form.intermediate, "a2_scale", call.a2_scale, form.w2_scale);
  MaskedLayer layer{.quantises = form.fp8, .rows = {}, .gate_up = {}, .inner = {}, .down = {}};
  if (form.fp8) {
    layer.rows = quantisation(rows, x.const_data_ptr(), x_row_stride, form.hidden, groups);
    layer.inner = quantisation(inner, intermediate, form.intermediate, form.intermediate, groups);
  } else {  // the GEMMs read rows as they are
    rows.out_row_stride = x_row_stride;
    inner.out = intermediate;
    inner.out_row_stride = form.intermediate;
  }

  Experts const& experts = call.experts;
  Weights const gate_up_weights{experts.w13, experts.w13_scale, call.w13_bias, form.w13_scale.n_segments};
  layer.gate_up = make_gemm(gate_up, gate_up_weights, form, rows, intermediate);
  gemm::Params& first = layer.gate_up.params;
  first.gating = make_gating(choice.gating, form.intermediate, call.flags);
  first.n = 2 * form.intermediate;  // without up rows each gate row serves as both
  first.out_row_stride = form.intermediate;
  first.groups = groups;
  if (!form.fp8) {
    first.a = x.const_data_ptr();
    first.wait = gemm::Wait::ForAll;  // whoever counted may be the kernel before
  }

  Weights const down_weights{experts.w2, experts.w2_scale, call.w2_bias, 1};
  layer.down = make_gemm(down, down_weights, form, inner, out.mutable_data_ptr());
  layer.down.params.out_row_stride = out_row_stride;
  layer.down.params.groups = groups;
  return layer;
}

}  // namespace moe_ext::fused_moe
