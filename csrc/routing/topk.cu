// One warp for each token: scores in registers, then top_k rounds that take the best expert left.
#include <bit>
#include <iterator>

#include "common/check.hpp"
#include "common/launch.hpp"
#include "routing/bias.cuh"
#include "routing/candidates.cuh"
#include "routing/groups.cuh"
#include "routing/launch.hpp"
#include "routing/logits.cuh"
#include "routing/scores.cuh"

namespace moe_ext::routing {
namespace {

// Tokens of a CTA. An SM has four schedulers, so up to four warps do not slow each other down.
constexpr int kWarps = 4;
// What a sum of weights is kept from being zero by, as in DeepSeek's own code.
constexpr float kLeastSum = 1e-20f;

struct KernelParams {
  Params problem;
  Access access;
  int lanes_per_group;
};

/// The weight of a lane's expert; zero in lanes that have none or one that does not count.
__device__ float weight_of(Params const& params,
                           Softmax softmax,
                           std::int64_t token,
                           Candidate const& candidate) {
  bool const counts = candidate.key > kLastKey;
  float const logit = counts ? load_logit(params, token, candidate.expert) : -INFINITY;
  bool const of_selected = params.scoring == Scoring::SoftmaxTopk;
  float weight = 0.0f;
  if (of_selected) {
    float const largest = number_of(__reduce_max_sync(kAllLanes, key_of(logit)));
    weight = counts ? expf(logit - largest) : 0.0f;
  } else if (counts) {
    weight =
        with_scoring(params.scoring, [&]<Scoring kScoring>() { return score_of<kScoring>(logit, softmax); });
  }
  if (of_selected || params.renormalize) {
    weight = weight / (sum_of_lanes(weight) + kLeastSum);
  }
  return weight * params.scale;
}

template <int kValues>
__global__ __launch_bounds__(kWarps* kWarp) void topk_kernel(__grid_constant__ KernelParams const params) {
  __shared__ unsigned shared_keys[kWarps][SharedKeys::size(kWarp * kValues)];
  Params const& problem = params.problem;
  // Nothing is read or written before the kernel in front has ended; one behind may begin, and waits for this one.
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  int const warp = static_cast<int>(threadIdx.x) / kWarp;
  std::int64_t const token = std::int64_t{blockIdx.x} * kWarps + warp;
  if (token >= problem.num_tokens) {
    return;
  }
  int const lane = lane_idx();
  int const first_expert = lane * kValues;
  bool const biased = problem.bias != nullptr;
  Biases<kValues> biases{};
  if (biased) {
    biases.load(problem, lane);  // first, to be on the way together with the logits
  }
  float logits[kValues];
  load_logits(problem, token, first_expert, params.access, logits);
  unsigned keys[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    keys[i] = first_expert + i < problem.num_experts ? key_of(logits[i]) : kNoKey;
  }
  Softmax softmax{};
  if (problem.scoring == Scoring::Softmax) {
    softmax = softmax_of(logits, keys);
  }
  // Without a bias logits choose: scores have the same order, only with more of them equal.
  SharedKeys const shared{shared_keys[warp]};
  if (biased || problem.num_groups > 1) {
    shared.store(keys);
    if (biased) {
      add_bias(problem, softmax, biases, shared);
    }
    if (problem.num_groups > 1) {
      drop_groups(problem, params.lanes_per_group, shared);
    }
    shared.load(keys);
  }
  Candidates<kValues> candidates(keys, shared);
  Candidate own{kNoKey, 0};
  for (int round = 0; round < problem.top_k; ++round) {
    Candidate const best = candidates.take();
    if (lane == round) {
      own = best;
    }
  }
  float const weight = weight_of(problem, softmax, token, own);
  if (lane < problem.top_k) {
    problem.weights[token * problem.weights_row_stride + lane] = weight;
    problem.ids[token * problem.ids_row_stride + lane] = own.expert;
  }
}

/// Entry i is for up to 32 * 2^i experts.
constexpr void (*kKernels[])(KernelParams) = {&topk_kernel<1>,
                                              &topk_kernel<2>,
                                              &topk_kernel<4>,
                                              &topk_kernel<8>,
                                              &topk_kernel<16>,
                                              &topk_kernel<32>,
                                              &topk_kernel<64>};
static_assert(kWarp << (std::size(kKernels) - 1) == kMaxExperts, "every number of experts has a kernel");

int bytes_of(InputType type) {
  return type == InputType::FP32 ? 4 : 2;
}

Access access_of(Params const& params, int values) {
  int const bytes = bytes_of(params.logits_type);
  int const elems = std::min(values, 16 / bytes);
  bool const aligned = reinterpret_cast<std::uintptr_t>(params.logits) % (elems * bytes) == 0 &&
                       params.logits_row_stride % elems == 0;
  return aligned && params.num_experts % elems == 0 ? Access::Vector : Access::Element;
}

}  // namespace

void topk_routing(Params const& params, cudaStream_t stream) {
  unsigned const lanes_full = static_cast<unsigned>((params.num_experts + kWarp - 1) / kWarp);
  int const index = std::bit_width(lanes_full - 1);
  KernelParams kernel_params{.problem = params,
                             .access = access_of(params, 1 << index),
                             .lanes_per_group = lanes_per_group(params.num_groups)};
  Params& problem = kernel_params.problem;
  if (problem.scoring == Scoring::Softmax && problem.renormalize && problem.bias == nullptr) {
    problem.scoring = Scoring::SoftmaxTopk;  // the same, without the sum over all experts
  }
  if (problem.topk_groups == problem.num_groups) {
    problem.num_groups = problem.topk_groups = 1;
  }
  unsigned const grid = (static_cast<unsigned>(params.num_tokens) + kWarps - 1) / kWarps;
  LaunchShape const shape{
      .grid = grid, .threads = kWarps * kWarp, .cluster = 1, .shared_bytes = 0, .programmatic = true};
  launch_kernel(kKernels[index], shape, stream, kernel_params);
}

}  // namespace moe_ext::routing
