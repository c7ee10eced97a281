// The experts of a layer on a buffer of rows for each of them, as a chain of kernels. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "fused_moe/layer.hpp"
#include "quantize/params.hpp"

namespace moe_ext::fused_moe {

/// The stages, in order. Rows stay where they are, so nothing is sorted, gathered or combined.
struct MaskedLayer {
  bool quantises;          // whether the GEMMs read FP8
  quantize::Params rows;   // of hidden_states, for gate_up
  LayerGemm gate_up;       // gated: leaves the intermediate, after the activation
  quantize::Params inner;  // of the intermediate, for down
  LayerGemm down;
};

/// Launches the chain. A stage that quantises is an ordinary launch, and so is gate_up where it is the first: it begins
/// when all before it has ended, with counts and weights final by then. So the GEMM right behind it may load weights
/// while it still runs. The values that are quantised for down may lie where gate_up read its own.
void run_masked_layer(MaskedLayer const& layer, cudaStream_t stream);

}  // namespace moe_ext::fused_moe
