// One scale for each row, by token: a token lies in the registers of as many warps as it takes, up to 1024 threads.
#include "fused_moe/gather_launch.hpp"
#include "fused_moe/gather_tokens.cuh"
#include "fused_moe/gather_whole_rows.cuh"

namespace moe_ext::fused_moe::gather {
namespace {

// Two CTAs an SM. With fewer tokens, more threads share one, a vector each, and CTAs share its slots.
constexpr int kBusyCtas = 264;
constexpr int kManyVectors = 2;  // of a lane: 16 FP8 values, stored as one

struct WholeTokenParams {
  TokenSource source;
  int threads_per_token;  // whole warps; more than one only where a token has a CTA for itself
};

template <int kVectors>
__global__ __launch_bounds__(kMaxRowThreads) void gather_token_row_scales_kernel(
    __grid_constant__ WholeTokenParams const params) {
  TokenSource const& source = params.source;
  GatherParams const& problem = source.problem;
  wait_for_previous_kernel(problem);
  int const threads = params.threads_per_token;
  int const thread = static_cast<int>(threadIdx.x) % threads;
  int const in_cta = static_cast<int>(threadIdx.x) / threads;
  Token const token =
      find_token(source, static_cast<int>(blockIdx.x) * (static_cast<int>(blockDim.x) / threads) + in_cta);
  // The same for all threads of the token, so for all that meet below.
  if (token.left == 0 || is_dropped(source, token)) {
    return;
  }
  int const column = thread * kVectors * RowVector::kElems;
  int const part = threads * kVectors * RowVector::kElems;
  RowVector vectors[kVectors];
  load_neighbours(token.x + column, token.left - column, vectors);
  float largest = largest_of(vectors);
  if (part < token.left) {
    for (int own = part + column; own - column < token.left; own += part) {
      load_neighbours(token.x + own, token.left - own, vectors);
      largest = fmaxf(largest, largest_of(vectors));
    }
    // Back to the first part, with which the loop below begins.
    load_neighbours(token.x + column, token.left - column, vectors);
  }
  float const scale = quantize::scale_of(largest_of_row(largest, threads), false);
  quantize::Divisor const divisor(scale);
  std::uint8_t* const out = fp8_row(problem, 0);
  for (int own = column; own - column < token.left; own += part) {
    if (own > column) {
      load_neighbours(token.x + own, token.left - own, vectors);
    }
    auto const values = quantize_all<quantize::Values::OfTheScale>(vectors, divisor);
    for_each_row(
        source, token, [&](std::int64_t offset) { store_fp8(values, out + offset + own, token.left - own); });
  }
  // The first warp's lanes have a row each.
  if (thread < kWarp && is_row(problem, token.row)) {
    problem.scale[token.row * problem.scale_row_stride] = scale;
  }
}

template <int kVectors>
void launch(GatherParams const& params, cudaStream_t stream) {
  constexpr int kColumns = RowVector::kElems * kVectors * kWarp;  // of a warp
  int const warps = static_cast<int>(
      std::min<std::int64_t>(ceil_div(params.hidden_size, kColumns), kMaxRowThreads / kWarp));
  int const tokens = warps == 1 ? kPreferredRowThreads / kWarp : 1;  // of a CTA
  WholeTokenParams const kernel_params{.source = make_token_source(params, params.num_tokens, kBusyCtas),
                                       .threads_per_token = warps * kWarp};
  int const shares = checked_units(params.num_tokens * kernel_params.source.shares.divisor);
  LaunchShape const shape{.grid = static_cast<unsigned>(ceil_div(shares, tokens)),
                          .threads = static_cast<unsigned>(warps * kWarp * tokens),
                          .cluster = 1,
                          .shared_bytes = 0,
                          .programmatic = params.programmatic};
  launch_kernel(gather_token_row_scales_kernel<kVectors>, shape, stream, kernel_params);
}

}  // namespace

void tokens_by_rows(GatherParams const& params, cudaStream_t stream) {
  if (params.num_tokens < kBusyCtas && params.hidden_size <= RowVector::kElems * kMaxRowThreads) {
    return launch<1>(params, stream);
  }
  launch<kManyVectors>(params, stream);
}

}  // namespace moe_ext::fused_moe::gather
