// The C++ side of torch.ops.moe_ext.grouped_gemm_launch, grouped_gemm_launch_with and grouped_gemm_configured.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

namespace moe_ext::grouped_gemm {

/// Bits of `flags`, twins of those in python/moe_ext/_run.py. One number, because each bool of a schema
/// costs the caller about 0.2 us.
enum Flag : std::int64_t {
  kMasked = 1,     // `a` is (num_groups, max_rows, k)
  kOffsReady = 2,  // `offs` and `b` were final before the previous kernel began
  kFp32Out = 4,    // dtype of the result where `out` is absent
  kFast = 8,       // FP8 sums may stay in the tensor core's accumulator
  kRemember = 16,  // `config` is the dispatcher's choice: remember it
};

/// out[i] = a[i] @ b[group(i)].T, dequantised by scale_a and scale_b, plus bias[group(i)], for every row that belongs
/// to a group, by the kernel of row `config` of configs.def. `a` is (num_rows, k) with end rows in `offs`, or
/// (num_groups, max_rows, k) with counts. `n_segments` and the offsets say how blocks of scale_b lie along n and k.
/// Checks everything memory safety depends on; reads no device memory.
void configured(torch::stable::Tensor const& a,
                torch::stable::Tensor const& b,
                torch::stable::Tensor const& offs,
                std::optional<torch::stable::Tensor> const& scale_a,
                std::optional<torch::stable::Tensor> const& scale_b,
                std::optional<torch::stable::Tensor> const& bias,
                torch::stable::Tensor const& out,
                bool offs_ready,
                std::int64_t n_segments,
                std::int64_t scale_n_offset,
                std::int64_t scale_k_offset,
                std::int64_t config);

/// The same into `out`, or into a new tensor, by the kernel that was remembered for the problem where `config` is -1.
/// Refuses, by std::invalid_argument, what is wrong, what has nothing to launch, and a problem that nothing was
/// remembered for: Python then checks, chooses and calls again with the choice. So nothing here calls Python.
torch::stable::Tensor launch_with(torch::stable::Tensor const& a,
                                  torch::stable::Tensor const& b,
                                  torch::stable::Tensor const& offs,
                                  std::optional<torch::stable::Tensor> const& scale_a,
                                  std::optional<torch::stable::Tensor> const& scale_b,
                                  std::optional<torch::stable::Tensor> const& bias,
                                  std::optional<torch::stable::Tensor> const& out,
                                  std::int64_t flags,
                                  std::int64_t n_segments,
                                  std::int64_t scale_n_offset,
                                  std::int64_t scale_k_offset,
                                  std::int64_t expected_rows,
                                  std::int64_t config);

/// The same without what is seldom said: one segment, no offsets, no expected rows, the remembered kernel.
torch::stable::Tensor launch(torch::stable::Tensor const& a,
                             torch::stable::Tensor const& b,
                             torch::stable::Tensor const& offs,
                             std::optional<torch::stable::Tensor> const& scale_a,
                             std::optional<torch::stable::Tensor> const& scale_b,
                             std::optional<torch::stable::Tensor> const& bias,
                             std::optional<torch::stable::Tensor> const& out,
                             std::int64_t flags);

}  // namespace moe_ext::grouped_gemm
