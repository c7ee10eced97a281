// A layer's GEMMs: which kernels serve them, how their rows are quantised, where their scales lie.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "fused_moe/checks.hpp"
#include "fused_moe/layer.hpp"
#include "grouped_gemm/config.hpp"

namespace moe_ext::fused_moe {

namespace gemm = moe_ext::grouped_gemm;

/// One of the two GEMMs' weights, with all that comes with them.
struct Weights {
  torch::stable::Tensor const& weight;
  std::optional<torch::stable::Tensor> const& scale;
  std::optional<torch::stable::Tensor> const& bias;
  std::int64_t n_segments;
};

/// Row `index` of configs.def, refused unless it makes `output` of operands with `scale`. So a choice for another kind
/// of layer shows at once.
gemm::RegisteredKernel const& kernel_for(
    char const* argument, std::int64_t index, gemm::Output output, WeightScale scale, std::int64_t flags);

/// Whether the first GEMM's kernel can quantise what it makes, which the second takes by a scale for each 128 values or
/// by `one_scale`, given.
bool can_quantise(gemm::Config const& config, Form const& form, bool one_scale);

/// Whether the first GEMM, by kernel `w13_config`, quantises what it makes: it can, and a caller's workspace has room
/// for these values apart from those that it reads.
bool leaves_fp8(Form const& form, std::int64_t w13_config, bool one_scale);

/// Whether the sort lists rows too, for GEMMs that then begin sooner. Measured in docs/notes/first-microseconds.md.
bool should_list(Form const& form);

/// Whether a kernel that can read rows where their tokens are should, in place of one before it that puts them in
/// order. That one's time grows with rows and hidden size; what the GEMM loses, where it is bound by the tensor core,
/// with the intermediate size too. With few tokens a launch less counts. Measured in docs/notes/token-gather.md.
bool should_gather(gemm::Config const& config, Form const& form);

/// Whether a kernel can do that: in whole pieces of 16 bytes, which 32 bits count.
bool can_gather(gemm::Config const& config, Form const& form, GatherParams const& rows);

/// How the rows of a stage become FP8: as the weight's scale asks for, and with the scale that is given, if one is.
void set_format(GatherParams& stage,
                char const* argument,
                std::optional<torch::stable::Tensor> const& given,
                WeightScale scale,
                int device);

/// The product of what `stage` leaves and weights that have passed.
LayerGemm make_gemm(gemm::RegisteredKernel const& kernel,
                    Weights const& weights,
                    Form const& form,
                    GatherParams const& stage,
                    void* out);

}  // namespace moe_ext::fused_moe
