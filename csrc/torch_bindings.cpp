// Every operator of the CUDA library: schema and registration, nothing else.
#include <string>
#include <type_traits>

#include <cuda_runtime_api.h>
#include <cutlass/version.h>
#include <torch/csrc/stable/library.h>

#include "grouped_gemm/config_list.hpp"
#include "grouped_gemm/op.hpp"
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
  // x (rows, k) or (groups, rows, k), q the same in FP8 E4M3, scale as `granularity` (params.hpp) has it, partials
  // (groups, any number) scratch of a computed scale of a whole tensor
  m.def(
      "quantize_fp8_configured(Tensor x, Tensor(a!) q, Tensor(b!) scale, Tensor(c!)? partials, "
      "Tensor? static_scale, Tensor? num_valid_rows, int granularity, bool power_of_two) -> ()");
  // logits (num_tokens, num_experts), correction_bias (num_experts,), weights (num_tokens, top_k) float32, ids the same
  // in int32, scoring of params.hpp
  m.def(
      "topk_routing_configured(Tensor logits, Tensor? correction_bias, Tensor(a!) weights, Tensor(b!) ids, "
      "int scoring, bool renormalize, int num_groups, int topk_groups, float scale) -> ()");
  // The compiled kernels as CSV, a header line first
  m.def("grouped_gemm_configs() -> str");
  // Lines of key=value
  m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CUDA, m) {
  m.impl("grouped_gemm_configured", moe_ext::CheckedBox<&moe_ext::grouped_gemm::configured>::value);
  m.impl("quantize_fp8_configured", moe_ext::CheckedBox<&moe_ext::quantize::configured>::value);
  m.impl("topk_routing_configured", moe_ext::CheckedBox<&moe_ext::routing::configured>::value);
}

// Ops without tensor arguments have no device to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(moe_ext, CompositeExplicitAutograd, m) {
  m.impl("grouped_gemm_configs", moe_ext::CheckedBox<&moe_ext::grouped_gemm::configs_csv>::value);
  m.impl("build_info", moe_ext::CheckedBox<&moe_ext::build_info>::value);
}
