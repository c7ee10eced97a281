// A layer whose experts have FP8 or BF16 weights, by expert and by stage, as one chain of kernels. No torch.
#pragma once

#include <array>
#include <optional>

#include <cuda_runtime_api.h>

#include "fused_moe/layer.hpp"

namespace moe_ext::fused_moe {

/// The stages, in order; a launch that the layer has no experts for is absent. Rows are sorted by the experts' places
/// (mixed_parts.hpp), so each launch has the rows of neighbours.
struct MixedLayer {
  SortParams sort;
  std::optional<GatherParams> quantised_rows;  // for gate_up in FP8: tokens as they are, or its rows
  std::optional<GatherParams>
      copied_rows;  // for gate_up in BF16, where it does not read hidden_states itself
  std::optional<LayerGemm> fp8_gate_up;
  std::optional<LayerGemm> bf16_gate_up;
  bool bf16_gate_up_first;
  // The intermediate: of the first part, or of all rows where no down is in BF16; of the last part.
  std::array<std::optional<GatherParams>, 2> quantize;
  std::array<std::optional<LayerGemm>, 2> fp8_down;  // the same
  std::optional<LayerGemm> bf16_down;
  bool bf16_down_first;
  CombineParams combine;
  bool sorts_beside_tokens = false;  // as a Layer
};

/// Launches the chain, in which run_layer's rules hold, and two more:
///  - of several GEMMs of a stage the first waits as a layer's does, and those behind it wait at their end alone
///    (Wait::AtEnd). What these read was final before the first one let them begin, which it did after its own wait,
///    and no two of them write a row that another reads;
///  - where down in BF16 is the first, the intermediate of the other experts is quantised beside it.
void run_mixed_layer(MixedLayer const& layer, cudaStream_t stream);

}  // namespace moe_ext::fused_moe
