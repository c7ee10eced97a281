// The launches of a layer of experts in two precisions.
#include "fused_moe/mixed_layer.hpp"

namespace moe_ext::fused_moe {
namespace {

void run(std::optional<GatherParams> const& stage, cudaStream_t stream) {
  if (stage.has_value()) {
    gather_quantize(*stage, stream);
  }
}

template <std::size_t kMost>
void run(std::array<std::optional<LayerGemm>, kMost> const& gemms, cudaStream_t stream) {
  for (std::optional<LayerGemm> const& gemm : gemms) {
    if (gemm.has_value()) {
      gemm->kernel->launch(gemm->params, stream);
    }
  }
}

}  // namespace

void run_mixed_layer(MixedLayer const& layer, cudaStream_t stream) {
  sort_tokens(layer.sort, stream);
  run(layer.quantised_rows, stream);
  run(layer.copied_rows, stream);
  run(layer.gate_up, stream);
  for (std::optional<GatherParams> const& stage : layer.quantize) {
    run(stage, stream);
  }
  run(layer.down, stream);
  combine(layer.combine, stream);
}

}  // namespace moe_ext::fused_moe
