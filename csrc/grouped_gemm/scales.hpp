// Which layouts of FP8 scales a kernel takes, and where they lie.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "grouped_gemm/config.hpp"
#include "grouped_gemm/params.hpp"

namespace moe_ext::grouped_gemm {

/// The problem that scales have to fit.
struct ScaleShape {
  Config kernel;
  std::int64_t num_rows;
  std::int64_t num_groups;
  std::int64_t max_rows;  // of each group in the masked layout, 0 in the contiguous one
  std::int64_t n;
  std::int64_t k;
  std::int64_t n_segments;  // parts of n with block grids of their own: 1 or 2
  std::int64_t n_offset;    // rows that the first block of a segment lacks, 0 .. 127
  std::int64_t k_offset;    // elements of K that the first block of a row lacks, 0 .. 127
  int device;
};

/// (), (1,), (num_rows,) or (num_rows, 1); of a block-scaled kernel also (num_rows, ceil(k / 128)). In the masked
/// layout (num_groups, max_rows) in place of (num_rows,), and (num_groups,).
TokenScales check_token_scales(std::optional<torch::stable::Tensor> const& scale, ScaleShape const& shape);

/// (), (1,), (num_groups,) or (num_groups, n) with trailing dimensions of 1; of a block-scaled kernel not the last but
/// (num_groups, blocks of n, blocks of k) or (num_groups, n_segments, blocks of a segment, blocks of k).
WeightScales check_weight_scales(std::optional<torch::stable::Tensor> const& scale, ScaleShape const& shape);

}  // namespace moe_ext::grouped_gemm
