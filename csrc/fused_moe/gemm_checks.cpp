// From weights and their scales to the parameters of a grouped GEMM.
#include "fused_moe/gemm_checks.hpp"

#include <limits>

#include "common/math.hpp"
#include "common/tensor_checks.hpp"
#include "fused_moe/op.hpp"
#include "fused_moe/workspace_layout.hpp"
#include "grouped_gemm/checks.hpp"
#include "grouped_gemm/scales.hpp"

namespace moe_ext::fused_moe {
namespace {

constexpr char const* kOp = "fused_moe";

/// How a kernel sums products. No gated one leaves the tensor core's sums where they are, nor does any where a result
/// must not depend on which kernels its batch takes: `kFast` allows it, no more.
gemm::Accumulate accumulate_of(WeightScale scale, gemm::Output output, std::int64_t flags) {
  switch (scale.granularity) {
    case Granularity::None:
      return gemm::Accumulate::FP32;
    case Granularity::RowBlocks:
      return gemm::Accumulate::Block;
    case Granularity::Tensor:
    case Granularity::Row:
      break;
  }
  bool const fast = (flags & (kFast | kBatchInvariant)) == kFast && output == gemm::Output::Rows;
  return fast ? gemm::Accumulate::Fast : gemm::Accumulate::Promoted;
}

/// A scale that is computed is that of a row or of a part of one, never of all rows: it takes one launch, not two, and
/// no token makes the values of another coarse.
GatherFormat format_of(WeightScale scale, bool given) {
  switch (scale.granularity) {
    case Granularity::None:
      return GatherFormat::BF16;
    case Granularity::RowBlocks:
      return GatherFormat::RowBlocks;
    case Granularity::Row:
      return GatherFormat::RowScale;
    case Granularity::Tensor:
      break;
  }
  return given ? GatherFormat::StaticScale : GatherFormat::RowScale;
}

/// What scales a stage of quantising leaves, as the GEMM behind it reads them.
gemm::TokenScales token_scales(GatherParams const& stage) {
  switch (stage.format) {
    case GatherFormat::BF16:
      return {};
    case GatherFormat::StaticScale:
      return {.data = stage.static_scale, .row_stride = 0, .k_stride = 0, .group_shift = 0};
    case GatherFormat::RowScale:
      return {.data = stage.scale, .row_stride = stage.scale_row_stride, .k_stride = 0, .group_shift = 0};
    case GatherFormat::RowBlocks:
      return {.data = stage.scale, .row_stride = stage.scale_row_stride, .k_stride = 1, .group_shift = 0};
  }
  return {};
}

}  // namespace

gemm::RegisteredKernel const& kernel_for(
    char const* argument, std::int64_t index, gemm::Output output, WeightScale scale, std::int64_t flags) {
  auto const& kernels = gemm::registered_kernels();
  check_value(index >= 0 && index < static_cast<std::int64_t>(kernels.size()),
              kOp,
              ": `",
              argument,
              "` must be the index of a kernel, got ",
              index);
  auto const& kernel = kernels[static_cast<std::size_t>(index)];
  gemm::Config const& config = kernel.config;
  auto const dtype = scale.granularity == Granularity::None ? gemm::Dtype::BF16 : gemm::Dtype::FP8;
  // Rows of gate and up in turn lie in no block grid that plain order could read a scale a tile from.
  bool const interleaved = output == gemm::Output::Gated && (flags & kInterleaved) != 0;
  check_value(
      (config.output == output || config.output == gemm::Output::Either) && config.dtype == dtype &&
          config.accumulate == accumulate_of(scale, config.output, flags) &&
          (!interleaved || !gemm::is_block_scaled(config.accumulate) || gemm::is_swapped(config.order)),
      kOp,
      ": `",
      argument,
      "` must be a kernel for these weights and scale layouts, got ",
      config.id);
  return kernel;
}

bool can_quantise(gemm::Config const& config, Form const& form, bool one_scale) {
  bool const in_blocks = gemm::quantises_features(config) &&
                         form.w2_scale.granularity == Granularity::RowBlocks &&
                         form.intermediate >= gemm::kScaleBlock;
  return in_blocks || (one_scale && gemm::quantises_by_one_scale(config));
}

bool leaves_fp8(Form const& form, std::int64_t w13_config, bool one_scale) {
  auto const& kernels = gemm::registered_kernels();
  if (w13_config < 0 || w13_config >= static_cast<std::int64_t>(kernels.size())) {
    return false;
  }
  if (!can_quantise(kernels[static_cast<std::size_t>(w13_config)].config, form, one_scale)) {
    return false;
  }
  std::int64_t const sizes[] = {form.slots(), form.hidden, form.intermediate, form.num_experts};
  return workspace_layout(sizes[0], sizes[1], sizes[2], sizes[3], true, true).total + kWorkspaceAlignment <=
         workspace_bytes(sizes[0], sizes[1], sizes[2], sizes[3]);
}

bool should_list(Form const& form) {
  // An expert has a second piece, which reads its weights again, only where a token has it twice.
  return form.num_tokens <= gemm::kListedRows && form.slots() <= (form.fp8 ? kMaxFewSlots : kMaxFewSlots / 2);
}

bool should_gather(gemm::Config const& config, Form const& form) {
  constexpr std::int64_t kShortIntermediate = 1024;
  constexpr std::int64_t kFewRowsPerExpert = 256;
  if (gemm::is_narrow(config)) {
    return true;
  }
  bool const loads_bind =
      !form.fp8 && config.tile_weights == 256 && form.slots() <= kFewRowsPerExpert * form.num_experts;
  return form.intermediate <= kShortIntermediate || loads_bind;
}

bool can_gather(gemm::Config const& config, Form const& form, GatherParams const& rows) {
  std::int64_t const row_bytes = form.fp8 ? rows.out_row_stride : rows.x_row_stride * 2;
  return gemm::gathers_tokens(config) && form.hidden * (form.fp8 ? 1 : 2) % 16 == 0 &&
         form.num_tokens * (row_bytes / 16) <= std::numeric_limits<std::uint32_t>::max();
}

void set_format(GatherParams& stage,
                char const* argument,
                std::optional<Tensor> const& given,
                WeightScale scale,
                int device) {
  stage.format = format_of(scale, given.has_value());
  if (!given.has_value()) {
    return;
  }
  check_value(stage.format == GatherFormat::StaticScale,
              kOp,
              ": `",
              argument,
              "` must be absent unless its weight has one scale, or one an expert, got a tensor");
  check_on_device(kOp, argument, *given, device, "hidden_states");
  check_dtype(kOp, argument, *given, ScalarType::Float);
  check_value(given->dim() == 0 || (given->dim() == 1 && given->size(0) == 1),
              kOp,
              ": `",
              argument,
              "` must have shape () or (1,), got another");
  stage.static_scale = static_cast<float const*>(given->const_data_ptr());
}

LayerGemm make_gemm(gemm::RegisteredKernel const& kernel,
                    Weights const& weights,
                    Form const& form,
                    GatherParams const& stage,
                    void* out) {
  Tensor const& weight = weights.weight;
  gemm::Config const& config = kernel.config;
  std::int64_t const n = weight.size(1);
  std::int64_t const k = weight.size(2);
  std::int64_t const bytes = form.fp8 ? 1 : 2;
  gemm::ScaleShape const shape{.kernel = config,
                               .num_rows = form.slots(),
                               .num_groups = form.num_experts,
                               .max_rows = 0,
                               .n = n,
                               .k = k,
                               .n_segments = weights.n_segments,
                               .n_offset = 0,
                               .k_offset = 0,
                               .device = form.device};
  std::int64_t const dense = ceil_div(k * bytes, 16) * 16;
  std::int64_t const row_bytes = n > 1 ? weight.stride(1) * bytes : dense;
  gemm::Params params{
      .a = stage.out,
      .b = weight.const_data_ptr(),
      .groups = {.offs = nullptr,
                 .num_groups = static_cast<int>(form.num_experts),
                 .num_rows = static_cast<int>(form.slots()),
                 .max_rows = 0},
      .scale_a = token_scales(stage),
      .scale_b = form.fp8 ? gemm::check_weight_scales(weights.scale, shape) : gemm::WeightScales{},
      .bias = gemm::check_bias(weights.bias, form.num_experts, n, form.device),
      .out = out,
      .n = n,
      .k = k,
      .a_row_stride_bytes = stage.out_row_stride * bytes,
      .b_row_stride_bytes = row_bytes,
      .b_group_stride_bytes = form.num_experts > 1 ? weight.stride(0) * bytes : n * row_bytes,
      .out_row_stride = n,
      .out_dtype = gemm::OutDtype::BF16,
      .wait = gemm::Wait::ForTokens,
      .device = form.device,
      .sm_count = form.sm_count};
  check_value(params.bias.data == nullptr || gemm::takes_bias(config),
              kOp,
              ": the kernel must take a bias, got ",
              config.id);
  return {.kernel = &kernel, .params = params};
}

}  // namespace moe_ext::fused_moe
