// The launches of a layer of experts in two precisions.
#include "fused_moe/mixed_layer.hpp"

#include "fused_moe/sort_and_quantize.hpp"

namespace moe_ext::fused_moe {
namespace {

void run(std::optional<GatherParams> const& stage, cudaStream_t stream) {
  if (stage.has_value()) {
    gather_quantize(*stage, stream);
  }
}

void run(std::optional<LayerGemm> const& gemm, cudaStream_t stream) {
  if (gemm.has_value()) {
    gemm->kernel->launch(gemm->params, stream);
  }
}

}  // namespace

void run_mixed_layer(MixedLayer const& layer, cudaStream_t stream) {
  if (layer.sorts_beside_tokens) {
    sort_and_quantize(&layer.sort, *layer.quantised_rows, stream);
  } else {
    sort_tokens(layer.sort, stream);
    run(layer.quantised_rows, stream);
  }
  run(layer.copied_rows, stream);
  run(layer.bf16_gate_up_first ? layer.bf16_gate_up : layer.fp8_gate_up, stream);
  run(layer.bf16_gate_up_first ? layer.fp8_gate_up : layer.bf16_gate_up, stream);
  if (layer.bf16_down_first) {
    run(layer.bf16_down, stream);
  }
  for (std::optional<GatherParams> const& stage : layer.quantize) {
    if (stage.has_value()) {
      quantize_features(*stage, layer.sorts_beside_tokens, stream);
    }
  }
  for (std::optional<LayerGemm> const& gemm : layer.fp8_down) {
    run(gemm, stream);
  }
  if (!layer.bf16_down_first) {
    run(layer.bf16_down, stream);
  }
  combine(layer.combine, stream);
}

}  // namespace moe_ext::fused_moe
