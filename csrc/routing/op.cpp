// Checks, then parameters: from torch tensors to one launch.
#include "routing/op.hpp"

#include <algorithm>
#include <limits>

#include "common/cuda_context.hpp"
#include "common/tensor_checks.hpp"
#include "common/tensor_strides.hpp"
#include "routing/launch.hpp"

namespace moe_ext::routing {
namespace {

constexpr char const* kOp = "topk_routing";

void check_between(char const* argument, std::int64_t value, std::int64_t least, std::int64_t most) {
  check_value(value >= least && value <= most,
              kOp,
              ": `",
              argument,
              "` must be in [",
              least,
              ", ",
              most,
              "], got ",
              value);
}

void check_last_dim(char const* argument, Tensor const& tensor) {
  check_value(tensor.size(1) <= 1 || tensor.stride(1) == 1,
              kOp,
              ": `",
              argument,
              "` must be contiguous in its last dimension, got stride ",
              tensor.stride(1));
}

/// (num_tokens, top_k), and no two rows in the same place.
void check_output(char const* argument,
                  Tensor const& tensor,
                  ScalarType dtype,
                  int device,
                  std::int64_t num_tokens,
                  std::int64_t top_k) {
  check_on_device(kOp, argument, tensor, device, "logits");
  check_dtype(kOp, argument, tensor, dtype);
  check_rank(kOp, argument, tensor, 2);
  check_size(kOp, argument, 0, tensor.size(0), num_tokens);
  check_size(kOp, argument, 1, tensor.size(1), top_k);
  check_last_dim(argument, tensor);
  check_value(num_tokens <= 1 || tensor.stride(0) >= top_k,
              kOp,
              ": `",
              argument,
              "` must have a stride of at least ",
              top_k,
              " between rows, got ",
              tensor.stride(0));
}

/// Checks a bias of one number for each expert.
void set_bias(Params& params, Tensor const& bias, int device) {
  check_on_device(kOp, "correction_bias", bias, device, "logits");
  params.bias_type = input_type(kOp, "correction_bias", bias);
  check_rank(kOp, "correction_bias", bias, 1);
  check_size(kOp, "correction_bias", 0, bias.size(0), params.num_experts);
  params.bias = bias.const_data_ptr();
  params.bias_stride = step(bias, 0);
}

}  // namespace

void configured(Tensor const& logits,
                std::optional<Tensor> correction_bias,
                Tensor const& weights,
                Tensor const& ids,
                std::int64_t scoring,
                bool renormalize,
                std::int64_t num_groups,
                std::int64_t topk_groups,
                double scale) {
  check_between("scoring", scoring, 0, static_cast<std::int64_t>(Scoring::SqrtSoftplus));
  check_value(logits.is_cuda(), kOp, ": `logits` must be a CUDA tensor, got another kind of device");
  int const device = logits.get_device_index();
  InputType const type = input_type(kOp, "logits", logits);
  check_rank(kOp, "logits", logits, 2);
  std::int64_t const num_tokens = logits.size(0);
  std::int64_t const num_experts = logits.size(1);
  check_value(num_tokens <= std::numeric_limits<int>::max(),
              kOp,
              ": `logits` must have fewer than 2^31 tokens, got ",
              num_tokens);
  check_value(num_experts >= 1 && num_experts <= kMaxExperts,
              kOp,
              ": `logits` must have 1 to ",
              kMaxExperts,
              " experts, got ",
              num_experts);
  check_last_dim("logits", logits);
  check_between("num_groups", num_groups, 1, kMaxGroups);
  check_value(num_experts % num_groups == 0,
              kOp,
              ": `num_groups` must divide ",
              num_experts,
              " experts, got ",
              num_groups);
  check_between("topk_groups", topk_groups, 1, num_groups);
  check_rank(kOp, "weights", weights, 2);
  std::int64_t const top_k = weights.size(1);
  std::int64_t const eligible = num_experts / num_groups * topk_groups;
  check_between("top_k", top_k, 1, std::min<std::int64_t>(kMaxTopK, eligible));
  check_output("weights", weights, ScalarType::Float, device, num_tokens, top_k);
  check_output("ids", ids, ScalarType::Int, device, num_tokens, top_k);

  Params params{.logits = logits.const_data_ptr(),
                .bias = nullptr,
                .weights = static_cast<float*>(weights.mutable_data_ptr()),
                .ids = static_cast<int*>(ids.mutable_data_ptr()),
                .logits_type = type,
                .bias_type = InputType::FP32,
                .scoring = static_cast<Scoring>(scoring),
                .renormalize = renormalize,
                .scale = static_cast<float>(scale),
                .num_tokens = static_cast<int>(num_tokens),
                .num_experts = static_cast<int>(num_experts),
                .top_k = static_cast<int>(top_k),
                .num_groups = static_cast<int>(num_groups),
                .topk_groups = static_cast<int>(topk_groups),
                .logits_row_stride = step(logits, 0),
                .bias_stride = 0,
                .weights_row_stride = step(weights, 0),
                .ids_row_stride = step(ids, 0)};
  if (correction_bias.has_value()) {
    set_bias(params, *correction_bias, device);
  }
  if (num_tokens == 0) {
    return;
  }
  DeviceGuard const guard(static_cast<torch::stable::accelerator::DeviceIndex>(device));
  topk_routing(params, current_stream(device));
}

}  // namespace moe_ext::routing
