// The launches of a masked layer.
#include "fused_moe/masked_layer.hpp"

#include "quantize/launch.hpp"

namespace moe_ext::fused_moe {
namespace {

void quantise(quantize::Params const& params, cudaStream_t stream) {
  switch (params.granularity) {
    case quantize::Granularity::Tensor:
      return quantize::quantize_tensor(params, stream);
    case quantize::Granularity::Row:
      return quantize::quantize_rows(params, stream);
    case quantize::Granularity::RowBlock:
      return quantize::quantize_row_blocks(params, stream);
    case quantize::Granularity::Tile:
      return quantize::quantize_tiles(params, stream);
  }
}

}  // namespace

void run_masked_layer(MaskedLayer const& layer, cudaStream_t stream) {
  if (layer.quantises) {
    quantise(layer.rows, stream);
  }
  layer.gate_up.kernel->launch(layer.gate_up.params, stream);
  if (layer.quantises) {
    quantise(layer.inner, stream);
  }
  layer.down.kernel->launch(layer.down.params, stream);
}

}  // namespace moe_ext::fused_moe
