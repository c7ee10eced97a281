// A scale for each row.
#include "fused_moe/gather_launch.hpp"
#include "fused_moe/gather_row_scales.cuh"

namespace moe_ext::fused_moe::gather {
namespace {

template <int kVectors>
__global__ __launch_bounds__(kMaxRowThreads) void gather_row_scales_kernel(
    __grid_constant__ RowParams const params) {
  quantise_rows<kVectors>(params, static_cast<int>(blockIdx.x));
}

}  // namespace

void by_rows(GatherParams const& params, cudaStream_t stream) {
  constexpr int kColumns = RowVector::kElems * kWarp;  // of a warp, a vector each
  if (has_few_rows(params) || params.hidden_size <= kColumns) {
    return launch_rows<1>(gather_row_scales_kernel<1>, params, stream);
  }
  if (params.hidden_size <= 2 * kColumns) {
    return launch_rows<2>(gather_row_scales_kernel<2>, params, stream);
  }
  launch_rows<kRowVectors>(gather_row_scales_kernel<kRowVectors>, params, stream);
}

}  // namespace moe_ext::fused_moe::gather
