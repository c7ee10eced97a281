// A layer of experts as a chain of kernels. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "fused_moe/combine.hpp"
#include "fused_moe/gather.hpp"
#include "fused_moe/sort.hpp"
#include "grouped_gemm/registry.hpp"

namespace moe_ext::fused_moe {

/// A grouped GEMM and the kernel that is to run it.
struct LayerGemm {
  grouped_gemm::RegisteredKernel const* kernel;
  grouped_gemm::Params params;
};

/// The stages, in order, each with the pointers that the ones before it fill.
struct Layer {
  SortParams sort;
  bool gathers;         // false: gate_up reads `hidden_states` themselves
  GatherParams gather;  // rows in the order of experts, or tokens as they are, for gate_up
  LayerGemm gate_up;    // gated: leaves the intermediate, after the activation
  bool quantizes;       // whether down reads FP8
  GatherParams quantize;
  LayerGemm down;
  CombineParams combine;
  bool sorts_beside_tokens = false;  // the launch that sorts quantises tokens too (sort_and_quantize)
};

/// Launches the chain. Each stage but the first may begin before the one in front of it has ended:
///  - gather waits for the sort, and lets gate_up begin only then: so the offsets are final when gate_up begins, which
///    loads weights while rows are still gathered, and waits for those itself;
///  - where gate_up gathers rows itself there is no such stage but to quantise tokens, which needs nothing of the
///    sort's and runs beside it, of few tokens in the same launch; gate_up then waits for both before it reads offsets;
///  - quantize lets down begin before it waits: the offsets were final a kernel earlier;
///  - whoever waits for a stage has waited for all in front of it, because that one waited too. So what a stage writes
///    may lie where one before the last read.
void run_layer(Layer const& layer, cudaStream_t stream);

/// What is between the GEMMs, by the kernel that quantised the tokens if it can.
void quantize_features(GatherParams const& rows, bool sorted_beside_tokens, cudaStream_t stream);

}  // namespace moe_ext::fused_moe
