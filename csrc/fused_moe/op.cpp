// Checks, then parameters: from torch tensors and a workspace to a layer.
#include "fused_moe/op.hpp"

#include <limits>

#include "common/cuda_context.hpp"
#include "common/math.hpp"
#include "common/tensor_checks.hpp"
#include "common/tensor_strides.hpp"
#include "fused_moe/combine_op.hpp"
#include "fused_moe/gather_op.hpp"
#include "fused_moe/layer.hpp"
#include "fused_moe/sort_op.hpp"
#include "fused_moe/workspace.hpp"
#include "grouped_gemm/checks.hpp"
#include "grouped_gemm/scales.hpp"

namespace moe_ext::fused_moe {
namespace {

namespace gemm = moe_ext::grouped_gemm;

constexpr char const* kOp = "fused_moe";
constexpr std::int64_t kScaleBlock = 128;
constexpr std::int64_t kMost = std::numeric_limits<int>::max() - (1 << 16);

struct LayerSizes {
  std::int64_t num_tokens;
  std::int64_t top_k;
  std::int64_t hidden;
  std::int64_t intermediate;
  std::int64_t num_experts;
  int device;
  int sm_count;

  std::int64_t slots() const {
    return num_tokens * top_k;
  }
};

/// One of the two GEMMs' weights, with all that comes with them.
struct Weights {
  char const* argument;
  Tensor const& weight;
  std::optional<Tensor> const& scale;
  std::optional<Tensor> const& bias;
  std::int64_t n_segments;
};

/// `other`: the one kind of kernels that will not do.
gemm::RegisteredKernel const& kernel_at(char const* argument, std::int64_t index, gemm::Output other) {
  auto const& kernels = gemm::registered_kernels();
  check_value(index >= 0 && index < static_cast<std::int64_t>(kernels.size()),
              kOp,
              ": `",
              argument,
              "` must be the index of a kernel, got ",
              index);
  auto const& kernel = kernels[static_cast<std::size_t>(index)];
  check_value(kernel.config.output != other,
              kOp,
              ": `",
              argument,
              "` must be a kernel of the other kind, got ",
              std::string(kernel.config.id));
  return kernel;
}

void check_weight(Weights const& weights, LayerSizes const& sizes, std::int64_t n, std::int64_t k, bool fp8) {
  char const* const argument = weights.argument;
  Tensor const& weight = weights.weight;
  check_on_device(kOp, argument, weight, sizes.device, "hidden_states");
  check_dtype(kOp, argument, weight, fp8 ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16);
  check_rank(kOp, argument, weight, 3);
  check_size(kOp, argument, 0, weight.size(0), sizes.num_experts);
  check_size(kOp, argument, 1, weight.size(1), n);
  check_size(kOp, argument, 2, weight.size(2), k);
  check_rows_aligned(kOp, argument, weight, weight.const_data_ptr());
}

/// The format of `quantise`'s argument; scales of it lie where the workspace has room for them.
GatherFormat format_at(char const* argument, std::int64_t number, bool fp8) {
  check_value(fp8 ? number >= 1 && number <= 4 : number == 0,
              kOp,
              ": `",
              argument,
              "` must be a format of gather.hpp for these weights, got ",
              number);
  return static_cast<GatherFormat>(number);
}

float const* static_scale(char const* argument, std::optional<Tensor> const& scale, int device) {
  if (!scale.has_value()) {
    return nullptr;
  }
  check_on_device(kOp, argument, *scale, device, "hidden_states");
  check_dtype(kOp, argument, *scale, ScalarType::Float);
  check_value(scale->dim() == 0 || (scale->dim() == 1 && scale->size(0) == 1),
              kOp,
              ": `",
              argument,
              "` must have shape () or (1,), got another");
  return static_cast<float const*>(scale->const_data_ptr());
}

/// What scales a stage of quantising leaves, as the GEMM behind it reads them.
gemm::TokenScales token_scales(GatherParams const& stage) {
  switch (stage.format) {
    case GatherFormat::BF16:
      return {};
    case GatherFormat::StaticScale:
      return {.data = stage.static_scale, .row_stride = 0, .k_stride = 0, .group_shift = 0};
    case GatherFormat::TensorScale:
      return {.data = stage.scale, .row_stride = 0, .k_stride = 0, .group_shift = 0};
    case GatherFormat::RowScale:
      return {.data = stage.scale, .row_stride = stage.scale_row_stride, .k_stride = 0, .group_shift = 0};
    case GatherFormat::RowBlocks:
      return {.data = stage.scale, .row_stride = stage.scale_row_stride, .k_stride = 1, .group_shift = 0};
  }
  return {};
}

void check_format(char const* argument, GatherFormat format, float const* given, gemm::Config const& kernel) {
  check_value((format == GatherFormat::StaticScale) == (given != nullptr),
              kOp,
              ": `",
              argument,
              "` must be given for one static scale and only then, got the other");
  check_value((format == GatherFormat::RowBlocks) == gemm::is_block_scaled(kernel.accumulate),
              kOp,
              ": the kernel must take the scales of its activations, got ",
              std::string(kernel.id));
}

LayerGemm make_gemm(gemm::RegisteredKernel const& kernel,
                    Weights const& weights,
                    LayerSizes const& sizes,
                    GatherParams const& stage,
                    void* out) {
  Tensor const& weight = weights.weight;
  gemm::Config const& config = kernel.config;
  bool const fp8 = config.dtype == gemm::Dtype::FP8;
  std::int64_t const n = weight.size(1);
  std::int64_t const k = weight.size(2);
  std::int64_t const bytes = fp8 ? 1 : 2;
  gemm::ScaleShape const shape{.kernel = config,
                               .num_rows = sizes.slots(),
                               .num_groups = sizes.num_experts,
                               .max_rows = 0,
                               .n = n,
                               .k = k,
                               .n_segments = weights.n_segments,
                               .n_offset = 0,
                               .k_offset = 0,
                               .device = sizes.device};
  std::int64_t const dense = ceil_div(k * bytes, 16) * 16;
  std::int64_t const row_bytes = n > 1 ? weight.stride(1) * bytes : dense;
  gemm::Params params{
      .a = stage.out,
      .b = weight.const_data_ptr(),
      .groups = {.offs = nullptr,
                 .num_groups = static_cast<int>(sizes.num_experts),
                 .num_rows = static_cast<int>(sizes.slots()),
                 .max_rows = 0},
      .scale_a = token_scales(stage),
      .scale_b = fp8 ? gemm::check_weight_scales(weights.scale, shape) : gemm::WeightScales{},
      .bias = gemm::check_bias(weights.bias, sizes.num_experts, n, sizes.device),
      .out = out,
      .n = n,
      .k = k,
      .a_row_stride_bytes = stage.out_row_stride * bytes,
      .b_row_stride_bytes = row_bytes,
      .b_group_stride_bytes = sizes.num_experts > 1 ? weight.stride(0) * bytes : n * row_bytes,
      .out_row_stride = n,
      .out_dtype = gemm::OutDtype::BF16,
      .offs_ready = true,
      .device = sizes.device,
      .sm_count = sizes.sm_count};
  check_value(params.bias.data == nullptr || gemm::takes_bias(config),
              kOp,
              ": the kernel must take a bias, got ",
              std::string(config.id));
  return {.kernel = &kernel, .params = params};
}

gemm::Gating make_gating(std::vector<double> const& numbers, std::int64_t intermediate, std::int64_t flags) {
  check_value(numbers.size() == 6, kOp, ": `gating` must have 6 numbers, got ", numbers.size());
  auto const at = [&](std::size_t index) { return static_cast<float>(numbers[index]); };
  bool const interleaved = (flags & kInterleaved) != 0;
  bool const ungated = (flags & kUngated) != 0;
  return {.linear = at(0),
          .cubic = at(1),
          .quintic = at(2),
          .gate_limit = at(3),
          .up_limit = at(4),
          .up_offset = at(5),
          .feature_step = interleaved ? 2 : 1,
          .up_step = ungated ? 0 : (interleaved ? 1 : static_cast<int>(intermediate)),
          .slab_step = interleaved ? 16 : 8,
          .joins = true};
}

}  // namespace

void fused_moe_configured(Tensor const& hidden_states,
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
                          Tensor const& workspace,
                          Tensor const& out,
                          std::vector<std::int64_t> const& layout,
                          std::vector<double> const& gating,
                          double routed_scale,
                          std::int64_t first_expert,
                          std::int64_t n_segments,
                          std::int64_t a1_format,
                          std::int64_t a2_format,
                          std::int64_t flags,
                          std::int64_t w13_config,
                          std::int64_t w2_config) {
  check_value(
      hidden_states.is_cuda(), kOp, ": `hidden_states` must be a CUDA tensor, got another kind of device");
  int const device = hidden_states.get_device_index();
  check_dtype(kOp, "hidden_states", hidden_states, ScalarType::BFloat16);
  check_rank(kOp, "hidden_states", hidden_states, 2);
  check_rows_aligned(kOp, "hidden_states", hidden_states, hidden_states.const_data_ptr());
  check_rank(kOp, "w2", w2, 3);
  check_rank(kOp, "topk_ids", topk_ids, 2);
  LayerSizes const sizes{.num_tokens = hidden_states.size(0),
                         .top_k = topk_ids.size(1),
                         .hidden = hidden_states.size(1),
                         .intermediate = w2.size(2),
                         .num_experts = w2.size(0),
                         .device = device,
                         .sm_count = sm_count(device)};
  bool const ungated = (flags & kUngated) != 0;
  check_value(sizes.hidden > 0 && sizes.hidden % 8 == 0 && sizes.hidden <= kMost && sizes.intermediate > 0 &&
                  sizes.intermediate % 8 == 0 && sizes.intermediate <= kMost / 2,
              kOp,
              ": hidden and intermediate size must be positive multiples of 8, got ",
              sizes.hidden,
              " and ",
              sizes.intermediate);
  check_size(kOp, "topk_ids", 0, topk_ids.size(0), sizes.num_tokens);
  check_on_device(kOp, "topk_ids", topk_ids, device, "hidden_states");
  check_value(sizes.slots() <= kMost, kOp, ": num_tokens * top_k must be at most ", kMost, ", got more");

  auto const& gate_up = kernel_at("w13_config", w13_config, gemm::Output::Rows);
  auto const& down = kernel_at("w2_config", w2_config, gemm::Output::Gated);
  bool const fp8 = gate_up.config.dtype == gemm::Dtype::FP8;
  check_value(down.config.dtype == gate_up.config.dtype,
              kOp,
              ": `w2_config` must be a kernel of `w13_config`'s dtype, got another");
  Weights const gate_up_weights{"w13", w13, w13_scale, w13_bias, n_segments};
  Weights const down_weights{"w2", w2, w2_scale, w2_bias, 1};
  check_weight(gate_up_weights, sizes, sizes.intermediate * (ungated ? 1 : 2), sizes.hidden, fp8);
  check_weight(down_weights, sizes, sizes.hidden, sizes.intermediate, fp8);
  check_value(n_segments == 1 || (!ungated && (flags & kInterleaved) == 0),
              kOp,
              ": `n_segments` must be 1 unless gate rows lie before up rows, got ",
              n_segments);
  check_value((flags & kInterleaved) == 0 || !gemm::is_block_scaled(gate_up.config.accumulate) ||
                  gemm::is_swapped(gate_up.config.order),
              kOp,
              ": `w13_config` must be a Swap-AB kernel for scales per block of interleaved rows, got ",
              std::string(gate_up.config.id));

  if (sizes.num_tokens == 0) {
    return;
  }
  WorkspaceParts const parts = check_workspace(
      workspace, layout, sizes.slots(), sizes.hidden, sizes.intermediate, sizes.num_experts, fp8, device);
  Layer layer{
      .sort = check_sort(topk_ids, sizes.num_experts, expert_map, first_expert),
      .gather = parts.gather,
      .gate_up = {},
      .quantizes = fp8,
      .quantize = parts.quantize,
      .down = {},
      .combine = check_combine(out,
                               sizes.top_k,
                               (flags & kWeightsOnInput) != 0 ? std::nullopt : std::optional(topk_weights),
                               addend,
                               routed_scale)};
  layer.sort.offs = parts.offs;
  layer.sort.row_slot = parts.row_slot;
  layer.sort.slot_row = parts.slot_row;
  layer.sort.scratch = parts.sort_scratch;
  check_value(
      sort_scratch_elems(sizes.slots(), static_cast<int>(sizes.num_experts)) <= parts.sort_scratch_elems,
      kOp,
      ": `workspace` must have room for sorting, got less");

  GatherParams& gather = layer.gather;
  gather.x = hidden_states.const_data_ptr();
  gather.x_row_stride = step(hidden_states, 0);
  gather.num_tokens = sizes.num_tokens;
  gather.top_k = static_cast<int>(sizes.top_k);
  gather.format = format_at("a1_format", a1_format, fp8);
  gather.static_scale = static_scale("a1_scale", a1_scale, device);
  check_format("a1_scale", gather.format, gather.static_scale, gate_up.config);
  if ((flags & kWeightsOnInput) != 0) {
    set_weights(gather, topk_weights, device);
  }
  layer.gate_up = make_gemm(gate_up, gate_up_weights, sizes, gather, parts.intermediate);
  gemm::Params& first = layer.gate_up.params;
  first.gating = make_gating(gating, sizes.intermediate, flags);
  first.n = 2 * sizes.intermediate;  // without up rows each gate row serves as both
  first.out_row_stride = sizes.intermediate;

  GatherParams& quantize = layer.quantize;
  GatherParams bf16 = quantize;  // what the down GEMM reads without quantising
  if (fp8) {
    quantize.format = format_at("a2_format", a2_format, fp8);
    quantize.static_scale = static_scale("a2_scale", a2_scale, device);
    check_format("a2_scale", quantize.format, quantize.static_scale, down.config);
  } else {
    bf16.out = parts.intermediate;
    bf16.out_row_stride = sizes.intermediate;
    bf16.format = GatherFormat::BF16;
  }
  layer.down = make_gemm(down, down_weights, sizes, fp8 ? quantize : bf16, parts.rows);
  check_value(down.config.output == gemm::Output::Rows || sizes.hidden % 16 == 0,
              kOp,
              ": `w2_config` must be a kernel of rows for a hidden size that is no multiple of 16, got ",
              std::string(down.config.id));

  layer.combine.y = parts.rows;
  layer.combine.num_rows = sizes.slots();
  layer.combine.slot_row = parts.slot_row;
  layer.combine.programmatic = true;
  check_value(layer.combine.num_tokens == sizes.num_tokens && layer.combine.hidden_size == sizes.hidden,
              kOp,
              ": `out` must have the shape of `hidden_states`, got another");
  for (gemm::Params* const params : {&layer.gate_up.params, &layer.down.params}) {
    params->groups.offs = parts.offs;
  }
  DeviceGuard const guard(static_cast<torch::stable::accelerator::DeviceIndex>(device));
  run_layer(layer, current_stream(device));
}

}  // namespace moe_ext::fused_moe
