// The C++ side of torch.ops.moe_ext.grouped_gemm_configured.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

namespace moe_ext::grouped_gemm {

/// out[i] = a[i] @ b[group(i)].T, dequantised by scale_a and scale_b, plus bias[group(i)], for every row that belongs
/// to a group, by the kernel of row `config` of configs.def. `a` is (num_rows, k) with end rows in `offs`, or
/// (num_groups, max_rows, k) with counts. `n_segments` and the offsets say how blocks of scale_b lie along n and k.
/// Checks everything memory safety depends on; reads no device memory.
void configured(torch::stable::Tensor const& a,
                torch::stable::Tensor const& b,
                torch::stable::Tensor const& offs,
                std::optional<torch::stable::Tensor> scale_a,
                std::optional<torch::stable::Tensor> scale_b,
                std::optional<torch::stable::Tensor> bias,
                torch::stable::Tensor const& out,
                bool offs_ready,
                std::int64_t n_segments,
                std::int64_t scale_n_offset,
                std::int64_t scale_k_offset,
                std::int64_t config);

}  // namespace moe_ext::grouped_gemm
