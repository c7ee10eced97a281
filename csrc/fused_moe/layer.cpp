// The launches of a layer.
#include "fused_moe/layer.hpp"

namespace moe_ext::fused_moe {

void run_layer(Layer const& layer, cudaStream_t stream) {
  sort_tokens(layer.sort, stream);
  if (layer.gathers) {
    gather_quantize(layer.gather, stream);
  }
  layer.gate_up.kernel->launch(layer.gate_up.params, stream);
  if (layer.quantizes) {
    gather_quantize(layer.quantize, stream);
  }
  layer.down.kernel->launch(layer.down.params, stream);
  combine(layer.combine, stream);
}

}  // namespace moe_ext::fused_moe
