// One launch: the first CTAs sort, the others quantise rows.
#include "common/launch.hpp"
#include "fused_moe/gather_row_blocks.cuh"
#include "fused_moe/gather_row_scales.cuh"
#include "fused_moe/gather_static_scale.cuh"
#include "fused_moe/sort_and_quantize.hpp"
#include "fused_moe/sort_few.cuh"
#include "fused_moe/sort_launch.hpp"

namespace moe_ext::fused_moe {
namespace {

using gather::ChunkParams;
using gather::RowParams;

template <class Rows>
struct Params {
  SortKernelParams sort;
  int sort_ctas;
  Rows rows;
};

struct ByRowBlocks {
  using Rows = ChunkParams;
  static constexpr int kMostThreads = gather::kFewChunkThreads;

  __device__ static void quantise(Rows const& rows, int cta) {
    gather::quantise_row_blocks<1>(rows, cta);
  }
};

struct ByStaticScale {
  using Rows = ChunkParams;
  static constexpr int kMostThreads = gather::kFewChunkThreads;

  __device__ static void quantise(Rows const& rows, int cta) {
    gather::quantise_by_static_scale<1>(rows, cta);
  }
};

struct ByRows {
  using Rows = RowParams;
  static constexpr int kMostThreads = gather::kMaxRowThreads;

  __device__ static void quantise(Rows const& rows, int cta) {
    gather::quantise_rows<1>(rows, cta);
  }
};

template <class Format, int kItems>
__global__ __launch_bounds__(Format::kMostThreads) void sort_and_quantize_kernel(
    __grid_constant__ Params<typename Format::Rows> const params) {
  int const cta = static_cast<int>(blockIdx.x) - params.sort_ctas;
  if (cta >= 0) {
    Format::quantise(params.rows, cta);
  } else if (threadIdx.x < kFewThreads) {
    sort_few_slots<kItems>(params.sort, static_cast<int>(blockIdx.x));
  }
}

/// The shape of `rows` alone.
LaunchShape shape_of(GatherParams const& rows) {
  if (rows.format == GatherFormat::RowScale) {
    return gather::row_shape(rows, gather::threads_per_row(rows, 1));
  }
  return gather::chunk_shape(gather::make_chunk_params<1>(rows), gather::kFewChunkThreads);
}

template <class Format>
void launch(SortParams const* sort,
            GatherParams const& rows,
            typename Format::Rows const& row_params,
            cudaStream_t stream) {
  Params<typename Format::Rows> params{.sort = {}, .sort_ctas = 0, .rows = row_params};
  LaunchShape shape = shape_of(rows);
  std::int64_t slots = rows.max_rows;
  if (sort != nullptr) {
    slots = sort->num_tokens * sort->top_k;
    SortPlan const plan = plan_sort(slots, sort->num_experts);
    params.sort = make_sort_kernel_params(*sort, plan);
    params.sort_ctas = plan.tiles;
    shape.grid += static_cast<unsigned>(plan.tiles);
    shape.programmatic = sort->programmatic;
  }
  auto* const kernel = slots > kWarp ? &sort_and_quantize_kernel<Format, kMaxFewSlots / kWarp>
                                     : &sort_and_quantize_kernel<Format, 1>;
  launch_kernel(kernel, shape, stream, params);
}

}  // namespace

bool can_sort_and_quantize(GatherParams const& rows) {
  // As gather_quantize takes these rows a vector a thread.
  bool const few =
      rows.format == GatherFormat::RowScale ? gather::has_few_rows(rows) : gather::has_few_chunks(rows);
  return few && rows.format != GatherFormat::BF16 && rows.out != rows.x && rows.slot_row == nullptr &&
         rows.weights_type == GatherWeights::None && rows.max_rows > 0 && rows.max_rows <= kMaxFewSlots;
}

bool can_sort_and_quantize(SortParams const& sort, GatherParams const& rows) {
  std::int64_t const slots = sort.num_tokens * sort.top_k;
  return slots > 0 && slots <= kMaxFewSlots && rows.row_slot == nullptr && rows.num_rows == nullptr &&
         can_sort_and_quantize(rows) && shape_of(rows).threads >= kFewThreads;
}

void sort_and_quantize(SortParams const* sort, GatherParams const& rows, cudaStream_t stream) {
  switch (rows.format) {
    case GatherFormat::BF16:
      fail_value("sort_and_quantize: rows must become FP8, got BF16");
    case GatherFormat::StaticScale:
      return launch<ByStaticScale>(sort, rows, gather::make_chunk_params<1>(rows), stream);
    case GatherFormat::RowBlocks:
      return launch<ByRowBlocks>(sort, rows, gather::make_chunk_params<1>(rows), stream);
    case GatherFormat::RowScale:
      return launch<ByRows>(
          sort,
          rows,
          {.source = gather::make_row_source(rows), .threads_per_row = gather::threads_per_row(rows, 1)},
          stream);
  }
}

}  // namespace moe_ext::fused_moe
