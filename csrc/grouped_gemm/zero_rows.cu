// An empty sum, row by row.
#include <algorithm>

#include "common/check.hpp"
#include "grouped_gemm/tiling.hpp"
#include "grouped_gemm/zero_rows.hpp"

namespace moe_ext::grouped_gemm {
namespace {

__global__ void zero_rows_kernel(
    int const* last_offset, char* out, int num_rows, std::int64_t row_stride_bytes, std::int64_t row_bytes) {
  int const rows = clamp_row(*last_offset, num_rows);
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    for (std::int64_t byte = threadIdx.x * 4; byte < row_bytes; byte += blockDim.x * 4) {
      *reinterpret_cast<unsigned*>(out + row * row_stride_bytes + byte) = 0;
    }
  }
}

}  // namespace

void zero_rows(Params const& params, cudaStream_t stream) {
  std::int64_t const element_bytes = params.out_dtype == OutDtype::FP32 ? 4 : 2;
  auto const grid = static_cast<unsigned>(std::min<std::int64_t>(params.num_rows, 8 * params.sm_count));
  zero_rows_kernel<<<grid, 256, 0, stream>>>(params.offs + params.num_groups - 1,
                                             static_cast<char*>(params.out),
                                             narrow(params.num_rows, "num_rows"),
                                             params.out_row_stride * element_bytes,
                                             params.n * element_bytes);
  check_cuda(cudaGetLastError(), "launching zero_rows");
}

}  // namespace moe_ext::grouped_gemm
