// What memory safety depends on: tensors of a call, checked, as the pointers and strides of a launch.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "grouped_gemm/config.hpp"
#include "grouped_gemm/params.hpp"

namespace moe_ext::grouped_gemm {

/// Arguments that both ops have. Refers to the op's own, so it lives no longer than they.
struct Call {
  torch::stable::Tensor const& a;
  torch::stable::Tensor const& b;
  torch::stable::Tensor const& offs;  // counts in the masked layout
  std::optional<torch::stable::Tensor> scale_a;
  std::optional<torch::stable::Tensor> scale_b;
  std::optional<torch::stable::Tensor> const& bias;
  bool offs_ready;
  std::int64_t n_segments;
  std::int64_t n_offset;
  std::int64_t k_offset;
};

struct Sizes {
  bool masked;
  std::int64_t num_rows;  // of all groups
  std::int64_t max_rows;  // of each group in the masked layout, 0 in the contiguous one
  std::int64_t num_groups;
  std::int64_t n;
  std::int64_t k;
  int device;
};

/// Checks `a`, `b` and `offs`, for operands of `dtype`.
Sizes check_operands(Call const& call, Dtype dtype);

/// Checks the rest of a call whose operands have passed, for the kernel that is to run.
Params check_call(Call const& call,
                  Sizes const& sizes,
                  Config const& kernel,
                  torch::stable::Tensor const& out,
                  int sm_count);

/// (num_groups, n) in bfloat16 or float32, any strides; none is no bias.
Bias check_bias(std::optional<torch::stable::Tensor> const& bias,
                std::int64_t num_groups,
                std::int64_t n,
                int device);

}  // namespace moe_ext::grouped_gemm
