// The launches of a layer.
#include "fused_moe/layer.hpp"

#include "fused_moe/sort_and_quantize.hpp"

namespace moe_ext::fused_moe {

void quantize_features(GatherParams const& rows, bool sorted_beside_tokens, cudaStream_t stream) {
  if (sorted_beside_tokens && can_sort_and_quantize(rows)) {
    sort_and_quantize(nullptr, rows, stream);
  } else {
    gather_quantize(rows, stream);
  }
}

void run_layer(Layer const& layer, cudaStream_t stream) {
  if (layer.sorts_beside_tokens) {
    sort_and_quantize(&layer.sort, layer.gather, stream);
  } else {
    sort_tokens(layer.sort, stream);
    if (layer.gathers) {
      gather_quantize(layer.gather, stream);
    }
  }
  layer.gate_up.kernel->launch(layer.gate_up.params, stream);
  if (layer.quantizes) {
    quantize_features(layer.quantize, layer.sorts_beside_tokens, stream);
  }
  layer.down.kernel->launch(layer.down.params, stream);
  combine(layer.combine, stream);
}

}  // namespace moe_ext::fused_moe
