// An empty sum, group by group.
#include "common/check.hpp"
#include "grouped_gemm/empty_sum.hpp"
#include "grouped_gemm/sm90/bias.cuh"
#include "grouped_gemm/tiling.hpp"

namespace moe_ext::grouped_gemm {
namespace {

struct EmptySumParams {
  GroupRows groups;
  Bias bias;
  void* out;
  std::int64_t row_stride;
  std::int64_t n;
};

template <class Element>
__global__ void empty_sum_kernel(__grid_constant__ EmptySumParams const params) {
  GroupRows const& groups = params.groups;
  int const group = static_cast<int>(blockIdx.x);
  RowRange const rows = rows_of(groups, group, end_before(groups, group), groups.offs[group]);
  auto* const out = static_cast<Element*>(params.out);
  for (int n = static_cast<int>(threadIdx.x); n < params.n; n += static_cast<int>(blockDim.x)) {
    float const value = params.bias.data == nullptr ? 0.f : read_bias(params.bias, group, n);
    for (std::int64_t row = rows.begin + blockIdx.y; row < rows.end; row += gridDim.y) {
      out[row * params.row_stride + n] = static_cast<Element>(value);
    }
  }
}

}  // namespace

void empty_sum(Params const& params, cudaStream_t stream) {
  EmptySumParams const launch{params.groups, params.bias, params.out, params.out_row_stride, params.n};
  dim3 const grid(static_cast<unsigned>(params.groups.num_groups), 16);
  if (params.out_dtype == OutDtype::FP32) {
    empty_sum_kernel<float><<<grid, 256, 0, stream>>>(launch);
  } else {
    empty_sum_kernel<__nv_bfloat16><<<grid, 256, 0, stream>>>(launch);
  }
  check_cuda(cudaGetLastError(), "launching empty_sum");
}

}  // namespace moe_ext::grouped_gemm
