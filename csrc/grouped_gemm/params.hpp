// Everything one launch of a grouped GEMM needs, as plain pointers and sizes.
#pragma once

#include <cstdint>

namespace moe_ext::grouped_gemm {

enum class OutDtype { BF16, FP32 };

struct Params {
  void const* a;         // (num_rows, k), K contiguous
  void const* b;         // (num_groups, n, k), K contiguous
  int const* offs;       // (num_groups,) end row of each group
  float const* scale_a;  // () or null
  float const* scale_b;  // (num_groups,) with stride scale_b_stride, or null
  void* out;             // (num_rows, n), N contiguous
  std::int64_t num_rows;
  std::int64_t num_groups;
  std::int64_t n;
  std::int64_t k;
  std::int64_t a_row_stride_bytes;
  std::int64_t b_row_stride_bytes;
  std::int64_t b_group_stride_bytes;
  std::int64_t scale_b_stride;  // elements; 0 for one scale for all groups
  std::int64_t out_row_stride;  // elements
  OutDtype out_dtype;
  bool offs_ready;  // `offs` and `b` were final before the previous kernel began: weights may be prefetched
  int sm_count;
};

}  // namespace moe_ext::grouped_gemm
