// What the operands of a layer must be, whichever of the ops they come to.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "fused_moe/checks.hpp"

namespace moe_ext::fused_moe {

/// Rows of an expert's matrix of the first GEMM.
std::int64_t first_rows(Form const& form, std::int64_t flags);

/// Hidden and intermediate size, and what `flags` say of gate and up.
void check_sizes(Form const& form, std::int64_t flags);

/// Tokens and choices.
void check_slots(Form const& form);

/// The weights of `form.num_experts` experts, each (n, k), in the precision of `form`.
void check_weight(char const* argument,
                  torch::stable::Tensor const& weight,
                  Form const& form,
                  std::int64_t n,
                  std::int64_t k);

/// Of a weight that has passed: BF16 has no scale, FP8 one of a known layout.
WeightScale check_weight_scale(char const* argument,
                               std::optional<torch::stable::Tensor> const& scale,
                               torch::stable::Tensor const& weight,
                               bool fp8);

/// Whether the scales of both weights go with `flags`.
void check_layouts(Form const& form, std::int64_t flags);

/// Checks weights of 3 dimensions against the sizes in `form`, and what `flags` say of them; sets what their scales
/// say.
void check_weights(Form& form, Experts const& experts, std::int64_t flags);

/// The data of an int32 for each expert.
int const* check_expert_ints(char const* op,
                             char const* argument,
                             torch::stable::Tensor const& tensor,
                             Form const& form);

void check_map(std::optional<torch::stable::Tensor> const& expert_map, std::int64_t first_expert);
void check_addend(std::optional<torch::stable::Tensor> const& addend);
void check_out(torch::stable::Tensor const& out, Form const& form);

}  // namespace moe_ext::fused_moe
