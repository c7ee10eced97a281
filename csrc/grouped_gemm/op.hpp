// The C++ side of torch.ops.moe_ext.grouped_gemm_configured.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

namespace moe_ext::grouped_gemm {

/// out[i] = a[i] @ b[group(i)].T * scale_a * scale_b[group(i)] for every row below offs[-1], by the kernel of
/// row `config` of configs.def. Checks everything memory safety depends on; reads no device memory.
void configured(torch::stable::Tensor const& a,
                torch::stable::Tensor const& b,
                torch::stable::Tensor const& offs,
                std::optional<torch::stable::Tensor> scale_a,
                std::optional<torch::stable::Tensor> scale_b,
                torch::stable::Tensor const& out,
                bool offs_ready,
                std::int64_t config);

}  // namespace moe_ext::grouped_gemm
