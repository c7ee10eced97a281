// FP8 values in the place of the BF16 values that they are made from: a row is read as a whole before any of it is
// written. A scale for each row needs no kernel of its own, since it waits for the whole row anyway.
#include "fused_moe/gather_launch.hpp"
#include "fused_moe/gather_whole_rows.cuh"
#include "quantize/chunks.cuh"

namespace moe_ext::fused_moe::gather {
namespace {

constexpr int kBlockThreads = quantize::Chunks<Element>::kTeam;  // that share 128 columns

template <GatherFormat kFormat>
__global__ __launch_bounds__(kMaxRowThreads) void gather_in_place_kernel(
    __grid_constant__ RowParams const params) {
  RowsAtWork const rows(params.source.problem);
  GatherParams const& problem = params.source.problem;
  int const threads = params.threads_per_row;
  int const thread = static_cast<int>(threadIdx.x) % threads;
  int const in_cta = static_cast<int>(threadIdx.x) / threads;
  int const index = static_cast<int>(blockIdx.x) * (static_cast<int>(blockDim.x) / threads) + in_cta;
  Row const row = find_row(params.source, index, rows);
  // The same for all threads of the row, so for all that meet below.
  if (row.x == nullptr) {
    return;
  }
  int const end = problem.hidden_size;
  int const column = thread * RowVector::kElems;
  int const step = threads * RowVector::kElems;
  RowVector vectors[kRowVectors];
  load_part(params.source, row, column, step, end, vectors);
  float scales[kRowVectors];
  if constexpr (kFormat == GatherFormat::RowBlocks) {
#pragma unroll
    for (int i = 0; i < kRowVectors; ++i) {
      float const largest = quantize::largest_of(vectors[i]);
      scales[i] = quantize::scale_of(quantize::largest_of_lanes<kBlockThreads>(largest), false);
    }
  } else {
    float const scale = *problem.static_scale;
#pragma unroll
    for (float& own : scales) {
      own = scale;
    }
  }
  // From here on values are gone.
  if (threads == kWarp) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  constexpr auto kValues =
      kFormat == GatherFormat::RowBlocks ? quantize::Values::OfTheScale : quantize::Values::Any;
  std::uint8_t* const out = fp8_row(problem, index);
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i) {
    int const own = column + i * step;
    auto const values = quantize::quantize<Element, kValues>(vectors[i], quantize::Divisor(scales[i]));
    store_fp8(values, out + own, end - own);
    if (kFormat == GatherFormat::RowBlocks && thread % kBlockThreads == 0 && own < end) {
      problem.scale[index * problem.scale_row_stride + own / quantize::kBlock] = scales[i];
    }
  }
}

template <GatherFormat kFormat>
void launch(GatherParams const& params, cudaStream_t stream) {
  launch_rows<kRowVectors>(gather_in_place_kernel<kFormat>, params, stream);
}

}  // namespace

void in_place(GatherParams const& params, cudaStream_t stream) {
  static_assert(kMostColumnsInPlace == RowVector::kElems * kRowVectors * kMaxRowThreads);
  check_value(params.format != GatherFormat::BF16,
              "gather_quantize: a copy must not have the place of its source, got one address");
  check_value(params.hidden_size <= kMostColumnsInPlace && params.row_slot == nullptr &&
                  params.slot_row == nullptr && params.out_row_stride == 2 * params.x_row_stride,
              "gather_quantize: rows in the place of others must be where those are, at most ",
              kMostColumnsInPlace,
              " columns and without a map of slots, got ",
              params.hidden_size,
              " columns and strides of ",
              params.x_row_stride,
              " (BF16) and ",
              params.out_row_stride,
              " (FP8) elements");
  switch (params.format) {
    case GatherFormat::BF16:
      return;
    case GatherFormat::StaticScale:
      return launch<GatherFormat::StaticScale>(params, stream);
    case GatherFormat::RowScale:
      return by_rows(params, stream);
    case GatherFormat::RowBlocks:
      return launch<GatherFormat::RowBlocks>(params, stream);
  }
}

}  // namespace moe_ext::fused_moe::gather
