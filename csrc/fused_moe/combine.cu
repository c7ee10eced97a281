// A thread for 8 columns of a token: all of its rows are on the way before the first is used.
#include <algorithm>
#include <limits>

#include <cuda_bf16.h>
#include <cutlass/fast_math.h>

#include "common/launch.hpp"
#include "common/math.hpp"
#include "fused_moe/combine.hpp"
#include "fused_moe/sort.hpp"

namespace moe_ext::fused_moe {
namespace {

constexpr int kVector = 8;  // columns of a thread: 16 bytes of BF16
constexpr int kWarp = 32;
constexpr int kThreads = 128;
/// Up to so many threads are spread over more SMs, a warp to a CTA.
constexpr std::int64_t kFewThreads = 132 * kThreads;
/// Shared memory that nothing uses. Up to so many CTAs come while the GEMM still runs and would all crowd onto the SMs
/// that it leaves first; asked for this, eight fit one SM (docs/notes/layer-stages.md).
constexpr std::int64_t kCtasToSpread = 132 * 8;
constexpr int kSpreadingBytes = 26'000;

struct CombineKernelParams {
  CombineParams problem;
  cutlass::FastDivmod ctas_per_row;
  int vectors;      // of a row
  int row_threads;  // of a CTA that share a row; a power of two
};

__device__ void unpack(unsigned word, float& low, float& high) {
  low = __uint_as_float(word << 16);
  high = __uint_as_float(word & 0xffff0000u);
}

__device__ void unpack(uint4 const& words, float (&values)[kVector]) {
  unpack(words.x, values[0], values[1]);
  unpack(words.y, values[2], values[3]);
  unpack(words.z, values[4], values[5]);
  unpack(words.w, values[6], values[7]);
}

/// The weights of a token, 0 past the last choice. Not a branch for each weight, at the end of which it would have to
/// be there.
template <int kChoices>
__device__ void load_weights(CombineParams const& params, std::int64_t token, float (&weights)[kChoices]) {
  std::int64_t const first = token * params.weights_token_stride;
  std::int64_t const step = params.weights_choice_stride;
  if (params.weights == nullptr) {
#pragma unroll
    for (float& weight : weights) {
      weight = 1.0f;
    }
  } else if (params.weights_type == CombineType::FP32) {
    auto const* const data = static_cast<float const*>(params.weights) + first;
#pragma unroll
    for (int j = 0; j < kChoices; ++j) {
      weights[j] = j < params.top_k ? data[j * step] : 0.0f;
    }
  } else {
    auto const* const data = static_cast<unsigned short const*>(params.weights) + first;
    unsigned bits[kChoices];
#pragma unroll
    for (int j = 0; j < kChoices; ++j) {
      bits[j] = j < params.top_k ? data[j * step] : 0;
    }
#pragma unroll
    for (int j = 0; j < kChoices; ++j) {
      weights[j] = __uint_as_float(bits[j] << 16);
    }
  }
}

/// The addend's values of both types, as they lie in memory: BF16 fills the first half.
struct Addend {
  uint4 words[2];
};

__device__ Addend load_addend(CombineParams const& params, std::int64_t token, int column) {
  Addend addend{};
  if (params.addend != nullptr) {
    std::int64_t const index = token * params.addend_row_stride + column;
    if (params.addend_type == CombineType::BF16) {
      addend.words[0] =
          *reinterpret_cast<uint4 const*>(static_cast<__nv_bfloat16 const*>(params.addend) + index);
    } else {
      auto const* const words =
          reinterpret_cast<uint4 const*>(static_cast<float const*>(params.addend) + index);
      addend.words[0] = words[0];
      addend.words[1] = words[1];
    }
  }
  return addend;
}

__device__ void add(CombineParams const& params, Addend const& addend, float (&sums)[kVector]) {
  if (params.addend == nullptr) {
    return;
  }
  float values[kVector];
  if (params.addend_type == CombineType::BF16) {
    unpack(addend.words[0], values);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      values[4 * half] = __uint_as_float(addend.words[half].x);
      values[4 * half + 1] = __uint_as_float(addend.words[half].y);
      values[4 * half + 2] = __uint_as_float(addend.words[half].z);
      values[4 * half + 3] = __uint_as_float(addend.words[half].w);
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    sums[i] = __fadd_rn(sums[i], values[i]);
  }
}

__device__ unsigned pack(float low, float high) {
  __nv_bfloat162_raw const raw = __floats2bfloat162_rn(low, high);
  return static_cast<unsigned>(raw.x) | static_cast<unsigned>(raw.y) << 16;
}

__device__ void store(CombineParams const& params,
                      std::int64_t token,
                      int column,
                      float const (&sums)[kVector]) {
  std::int64_t const index = token * params.out_row_stride + column;
  if (params.out_type == CombineType::BF16) {
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(params.out) + index) = {
        pack(sums[0], sums[1]), pack(sums[2], sums[3]), pack(sums[4], sums[5]), pack(sums[6], sums[7])};
  } else {
    auto* const out = reinterpret_cast<float4*>(static_cast<float*>(params.out) + index);
    out[0] = {sums[0], sums[1], sums[2], sums[3]};
    out[1] = {sums[4], sums[5], sums[6], sums[7]};
  }
}

/// `kChoices` is top_k or the next number there is a kernel for. Plain loads, not __ldg: the compiler might move that
/// before a wait.
template <int kChoices>
__global__ __launch_bounds__(kThreads) void combine_kernel(
    __grid_constant__ CombineKernelParams const params) {
  CombineParams const& problem = params.problem;
  int const thread = static_cast<int>(threadIdx.x);
  int row_group, part;
  params.ctas_per_row(row_group, part, static_cast<int>(blockIdx.x));
  int const rows_of_cta = static_cast<int>(blockDim.x) / params.row_threads;
  std::int64_t const token = std::int64_t{row_group} * rows_of_cta + thread / params.row_threads;
  int const vector = part * params.row_threads + thread % params.row_threads;
  bool const active = token < problem.num_tokens && vector < params.vectors;
  int const column = vector * kVector;
  int const top_k = active ? problem.top_k : 0;
  int const* const slot_row = problem.slot_row + token * problem.top_k;
  auto const* const y = static_cast<__nv_bfloat16 const*>(problem.y) + column;
  if (!problem.only_y_is_new) {
    cudaGridDependencySynchronize();
  }
  int rows[kChoices];
#pragma unroll
  for (int j = 0; j < kChoices; ++j) {
    rows[j] = j < top_k ? slot_row[j] : -1;
  }
  float weights[kChoices];
  Addend addend{};
  if (active) {
    load_weights(problem, token, weights);
    addend = load_addend(problem, token, column);
  }
  cudaGridDependencySynchronize();  // returns at once the second time
  cudaTriggerProgrammaticLaunchCompletion();
  uint4 vectors[kChoices];
#pragma unroll
  for (int j = 0; j < kChoices; ++j) {
    rows[j] = rows[j] < problem.num_rows ? rows[j] : -1;
    vectors[j] = {};
    if (rows[j] >= 0) {
      vectors[j] = *reinterpret_cast<uint4 const*>(y + rows[j] * problem.y_row_stride);
    }
  }
  // Here and not before the loads: within one block of code the compiler would save registers, by putting off loads
  // until the first ones are used up, and pay their latency twice.
  if (!active) {
    return;
  }
  float sums[kVector] = {};
#pragma unroll
  for (int j = 0; j < kChoices; ++j) {
    float values[kVector];
    unpack(vectors[j], values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      // Rounded apart, as PyTorch's own operators do it; and a weight of NaN does not matter without its row.
      float const sum = __fadd_rn(sums[i], __fmul_rn(weights[j], values[i]));
      sums[i] = rows[j] >= 0 ? sum : sums[i];
    }
  }
#pragma unroll
  for (float& sum : sums) {
    sum = __fmul_rn(sum, problem.routed_scale);
  }
  add(problem, addend, sums);
  store(problem, token, column, sums);
}

/// Calls `function.template operator()<kChoices>()` for the least number of choices that holds `top_k`.
template <class Function>
void dispatch_choices(int top_k, Function const& function) {
  if (top_k <= 1) {
    return function.template operator()<1>();
  }
  if (top_k <= 2) {
    return function.template operator()<2>();
  }
  if (top_k <= 4) {
    return function.template operator()<4>();
  }
  if (top_k <= 8) {
    return function.template operator()<8>();
  }
  if (top_k <= 16) {
    return function.template operator()<16>();
  }
  static_assert(kMaxTopK == 32, "the last of the kernels takes all that may come");
  return function.template operator()<32>();
}

}  // namespace

void combine(CombineParams const& params, cudaStream_t stream) {
  check_value(params.top_k >= 1 && params.top_k <= kMaxTopK,
              "combine_tokens: `top_k` must be in [1, ",
              kMaxTopK,
              "], got ",
              params.top_k);
  check_value(params.hidden_size >= 0 && params.hidden_size % kVector == 0,
              "combine_tokens: `y` must have a multiple of ",
              kVector,
              " columns, got ",
              params.hidden_size);
  if (params.num_tokens == 0 || params.hidden_size == 0) {
    return;
  }
  int const vectors = params.hidden_size / kVector;
  int const threads = params.num_tokens * vectors <= kFewThreads ? kWarp : kThreads;
  int row_threads = 1;
  while (row_threads < std::min(vectors, threads)) {
    row_threads *= 2;
  }
  std::int64_t const ctas_per_row = ceil_div(vectors, row_threads);
  std::int64_t const grid = ctas_per_row * ceil_div(params.num_tokens, threads / row_threads);
  check_value(grid <= std::numeric_limits<int>::max(),
              "combine_tokens: there must be fewer than 2^31 CTAs, got ",
              grid);
  CombineKernelParams const kernel_params{.problem = params,
                                          .ctas_per_row = cutlass::FastDivmod(static_cast<int>(ctas_per_row)),
                                          .vectors = vectors,
                                          .row_threads = row_threads};
  LaunchShape const shape{.grid = static_cast<unsigned>(grid),
                          .threads = static_cast<unsigned>(threads),
                          .cluster = 1,
                          .shared_bytes = grid <= kCtasToSpread ? kSpreadingBytes : 0,
                          .programmatic = params.programmatic};
  dispatch_choices(params.top_k, [&]<int kChoices>() {
    launch_kernel(&combine_kernel<kChoices>, shape, stream, kernel_params);
  });
}

}  // namespace moe_ext::fused_moe
