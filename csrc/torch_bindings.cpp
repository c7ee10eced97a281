// Every operator of the CUDA library: schema and registration, nothing else.
#include <string>
#include <type_traits>

#include <cuda_runtime_api.h>
#include <cutlass/version.h>
#include <torch/csrc/stable/library.h>

#include "fused_moe/choices.hpp"
#include "fused_moe/combine_op.hpp"
#include "fused_moe/gather_op.hpp"
#include "fused_moe/masked_op.hpp"
#include "fused_moe/mixed_op.hpp"
#include "fused_moe/op.hpp"
#include "fused_moe/sort_op.hpp"
#include "grouped_gemm/config_list.hpp"
#include "grouped_gemm/op.hpp"
#include "preload.hpp"
#include "quantize/op.hpp"
#include "routing/op.hpp"

namespace moe_ext {
namespace {

/// Boxed values are 64 bits wide and copied as bits: a `float` or `int` parameter would arrive wrong.
template <class T>
inline constexpr bool kBoxable = !std::is_arithmetic_v<T> || std::is_same_v<T, bool> ||
                                 std::is_same_v<T, std::int64_t> || std::is_same_v<T, double>;

template <auto kFunction>
struct CheckedBox;

template <class Result, class... Arguments, Result (*kFunction)(Arguments...)>
struct CheckedBox<kFunction> {
  static_assert((kBoxable<std::remove_cvref_t<Arguments>> && ...),
                "op parameters must be Tensor, optional<Tensor>, int64_t, double, bool or a string");
  static constexpr auto value = TORCH_BOX(kFunction);
};

std::string build_info() {
  return "cuda_toolkit=" + std::to_string(CUDART_VERSION / 1000) + "." +
         std::to_string(CUDART_VERSION % 1000 / 10) + "\ncutlass=" + std::to_string(CUTLASS_MAJOR) + "." +
         std::to_string(CUTLASS_MINOR) + "." + std::to_string(CUTLASS_PATCH) +
         "\narch=sm_90a\ntorch_target=2.10\n";
}

}  // namespace
}  // namespace moe_ext

STABLE_TORCH_LIBRARY_FRAGMENT(moe_ext, m) {
  // a (num_rows, k) with offs (num_groups,) int32 end rows, or (num_groups, max_rows, k) with counts in their place;
  // b (num_groups, n, k), scales as in scales.hpp, bias (num_groups, n), out (num_rows, n) or (num_groups, max_rows,
  // n), config = row of configs.def
  m.def(
      "grouped_gemm_configured(Tensor a, Tensor b, Tensor offs, Tensor? scale_a, Tensor? scale_b, Tensor? "
      "bias, "
      "Tensor(a!) out, bool offs_ready, int n_segments, int scale_n_offset, int scale_k_offset, int config) "
      "-> ()");
  // The same into `out` or a new tensor, by the kernel remembered for the problem if `config` is -1; Flag in op.hpp
  m.def(
      "grouped_gemm_launch_with(Tensor a, Tensor b, Tensor offs, Tensor? scale_a, Tensor? scale_b, Tensor? "
      "bias, "
      "Tensor(a!)? out, int flags, int n_segments, int scale_n_offset, int scale_k_offset, int "
      "expected_rows, "
      "int config) -> Tensor(a!)");
  // The same with 1, 0, 0, -1, -1. An op of its own, because each argument costs its caller 0.1 us, said or not
  m.def(
      "grouped_gemm_launch(Tensor a, Tensor b, Tensor offs, Tensor? scale_a=None, Tensor? scale_b=None, "
      "Tensor? bias=None, Tensor(a!)? out=None, int flags=0) -> Tensor(a!)");
  // x (rows, k) or (groups, rows, k), q the same in FP8 E4M3, scale as `granularity` (params.hpp) has it, partials
  // (groups, any number) scratch of a computed scale of a whole tensor
  m.def(
      "quantize_fp8_configured(Tensor x, Tensor(a!) q, Tensor(b!) scale, Tensor(c!)? partials, "
      "Tensor? static_scale, Tensor? num_valid_rows, int granularity, bool power_of_two) -> ()");
  // topk_ids (num_tokens, top_k), offs (num_experts,), row_slot and slot_row (num_tokens * top_k,), scratch as long as
  // sort_tokens_scratch says, expert_map (num_global,)
  m.def(
      "sort_tokens_configured(Tensor topk_ids, Tensor(a!) offs, Tensor(b!) row_slot, Tensor(c!) slot_row, "
      "Tensor(d!)? scratch, Tensor? expert_map, int first_expert) -> ()");
  // Elements of scratch, from numbers
  m.def("sort_tokens_scratch(int num_slots, int num_experts) -> int");
  // y (num_rows, hidden_size), slot_row (num_tokens * top_k,), topk_weights (num_tokens, top_k), addend and out
  // (num_tokens, hidden_size)
  m.def(
      "combine_tokens_configured(Tensor y, Tensor slot_row, Tensor? topk_weights, Tensor? addend, "
      "Tensor(a!) out, int top_k, float routed_scale) -> ()");
  // x (num_tokens, hidden_size), row_slot (max_rows,), num_rows one, topk_weights (num_tokens, top_k), out (max_rows,
  // hidden_size), scale as `format` (gather.hpp) has it, slot_row (num_tokens * top_k,), which without weights takes
  // the place of row_slot and num_rows
  m.def(
      "gather_quantize_configured(Tensor x, Tensor? row_slot, Tensor? num_rows, Tensor? topk_weights, "
      "Tensor(a!) out, Tensor(b!)? scale, Tensor? static_scale, int top_k, int format, bool programmatic, "
      "Tensor? slot_row=None) -> ()");
  // logits (num_tokens, num_experts), correction_bias (num_experts,), weights (num_tokens, top_k) float32, ids the same
  // in int32, scoring of params.hpp
  m.def(
      "topk_routing_configured(Tensor logits, Tensor? correction_bias, Tensor(a!) weights, Tensor(b!) ids, "
      "int scoring, bool renormalize, int num_groups, int topk_groups, float scale) -> ()");
  // A layer: topk_weights and topk_ids (num_tokens, top_k), workspace and out made if absent, the rest as
  // fused_moe/op.hpp has it; by the kernels remembered for the problem
  m.def(
      "fused_moe_launch_with(Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights, Tensor "
      "topk_ids, Tensor? w13_scale, Tensor? w2_scale, Tensor? a1_scale, Tensor? a2_scale, Tensor? w13_bias, "
      "Tensor? w2_bias, Tensor? expert_map, Tensor? addend, Tensor(b!)? workspace, Tensor(a!)? out, int "
      "flags, "
      "float alpha, float limit, float routed_scale, int first_expert) -> Tensor(a!)");
  // The same with nothing for what is left out here. An op of its own for the sake of its few arguments, as above
  m.def(
      "fused_moe_launch(Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
      "Tensor? w13_scale, Tensor? w2_scale, Tensor(b!)? workspace, Tensor(a!)? out, int flags) -> "
      "Tensor(a!)");
  // The same by given kernels, rows of configs.def, and with a given gating; table and allowed: the rule that they were
  // chosen by, -1 for none
  m.def(
      "fused_moe_configured(Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights, Tensor "
      "topk_ids, Tensor? w13_scale, Tensor? w2_scale, Tensor? a1_scale, Tensor? a2_scale, Tensor? w13_bias, "
      "Tensor? w2_bias, Tensor? expert_map, Tensor? addend, Tensor(b!)? workspace, Tensor(a!)? out, int "
      "flags, "
      "float alpha, float limit, float routed_scale, int first_expert, int w13_config, int w2_config, "
      "float[] "
      "gating, int table, int allowed) -> Tensor(a!)");
  // The same on buffers: hidden_states and out (num_experts, max_rows, hidden_size), counts (num_experts,), scratch as
  // fused_moe/masked_checks.hpp has it
  m.def(
      "fused_moe_masked_configured(Tensor hidden_states, Tensor w13, Tensor w2, Tensor counts, Tensor? "
      "w13_scale, Tensor? w2_scale, Tensor? a1_scale, Tensor? a2_scale, Tensor? w13_bias, Tensor? w2_bias, "
      "Tensor(b!) intermediate, Tensor(c!)? quantised, Tensor(d!)? scale, Tensor(a!) out, int flags, "
      "int w13_config, int w2_config, float[] gating) -> ()");
  // A layer of experts in FP8 or BF16 by expert and by stage: places (num_experts,), weights in the order of places,
  // kernels and gating empty for those remembered for the problem, the rest as fused_moe/mixed_op.hpp has it
  m.def(
      "fused_moe_mixed_launch(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor places, "
      "Tensor? "
      "w13_fp8, Tensor? w13_bf16, Tensor? w2_fp8, Tensor? w2_bf16, Tensor? w13_scale, Tensor? w2_scale, "
      "Tensor? a1_scale, Tensor? a2_scale, Tensor? w13_fp8_bias, Tensor? w13_bf16_bias, Tensor? w2_fp8_bias, "
      "Tensor? w2_bf16_bias, Tensor? expert_map, Tensor? addend, Tensor(b!)? workspace, Tensor(a!)? out, "
      "int num_fp8, int flags, float alpha, float limit, float routed_scale, int first_expert, int[] "
      "kernels, "
      "float[] gating) -> Tensor(a!)");
  // A table of measured choices by a number, for `fused_moe_configured`
  m.def(
      "fused_moe_teach(int number, int[] choices, int[] costly, float[] costs, float[] common, float[] "
      "problems, int sm_count, float radius, float shrink) -> ()");
  // The compiled kernels as CSV, a header line first
  m.def("grouped_gemm_configs() -> str");
  // Loads every kernel into the device's context; how many there are
  m.def("preload_kernels(int device) -> int");
  // Lines of key=value
  m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) {
  m.impl("grouped_gemm_configured", moe_ext::CheckedBox<&moe_ext::grouped_gemm::configured>::value);
  m.impl("grouped_gemm_launch_with", moe_ext::CheckedBox<&moe_ext::grouped_gemm::launch_with>::value);
  m.impl("grouped_gemm_launch", moe_ext::CheckedBox<&moe_ext::grouped_gemm::launch>::value);
  m.impl("quantize_fp8_configured", moe_ext::CheckedBox<&moe_ext::quantize::configured>::value);
  m.impl("sort_tokens_configured", moe_ext::CheckedBox<&moe_ext::fused_moe::sort_tokens_configured>::value);
  m.impl("combine_tokens_configured",
         moe_ext::CheckedBox<&moe_ext::fused_moe::combine_tokens_configured>::value);
  m.impl("fused_moe_launch_with", moe_ext::CheckedBox<&moe_ext::fused_moe::fused_moe_launch_with>::value);
  m.impl("fused_moe_launch", moe_ext::CheckedBox<&moe_ext::fused_moe::fused_moe_launch>::value);
  m.impl("fused_moe_configured", moe_ext::CheckedBox<&moe_ext::fused_moe::fused_moe_configured>::value);
  m.impl("fused_moe_masked_configured",
         moe_ext::CheckedBox<&moe_ext::fused_moe::fused_moe_masked_configured>::value);
  m.impl("fused_moe_mixed_launch", moe_ext::CheckedBox<&moe_ext::fused_moe::fused_moe_mixed_launch>::value);
  m.impl("gather_quantize_configured",
         moe_ext::CheckedBox<&moe_ext::fused_moe::gather_quantize_configured>::value);
  m.impl("topk_routing_configured", moe_ext::CheckedBox<&moe_ext::routing::configured>::value);
}

// Ops without tensor arguments have no device to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(moe_ext, CompositeExplicitAutograd, m) {
  m.impl("grouped_gemm_configs", moe_ext::CheckedBox<&moe_ext::grouped_gemm::configs_csv>::value);
  m.impl("sort_tokens_scratch", moe_ext::CheckedBox<&moe_ext::fused_moe::sort_tokens_scratch>::value);
  m.impl("fused_moe_teach", moe_ext::CheckedBox<&moe_ext::fused_moe::fused_moe_teach>::value);
  m.impl("preload_kernels", moe_ext::CheckedBox<&moe_ext::preload_kernels>::value);
  m.impl("build_info", moe_ext::CheckedBox<&moe_ext::build_info>::value);
}
