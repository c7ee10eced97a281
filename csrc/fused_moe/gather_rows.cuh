// Where the row of a slot comes from, its values, and their products with the slot's weight.
#pragma once

#include <cutlass/fast_math.h>

#include "fused_moe/gather.hpp"
#include "quantize/vectors.cuh"

namespace moe_ext::fused_moe::gather {

using Element = __nv_bfloat16;
using RowVector = quantize::Vector<Element>;

inline constexpr int kWarp = 32;

/// What is the same for all rows, with divisions by constants made ready.
struct RowSource {
  GatherParams problem;
  cutlass::FastDivmod top_k;
};

inline RowSource make_row_source(GatherParams const& params) {
  return {.problem = params, .top_k = cutlass::FastDivmod(params.top_k)};
}

/// A row to read; without values where there is nothing to do.
struct Row {
  Element const* x;  // null for none
  float weight;
};

/// Rows, counts and slots come from the kernel before; nothing may be read earlier than this. Those that come after may
/// begin, since they wait for the end of this kernel in turn.
__device__ inline void wait_for_previous_kernel(GatherParams const& problem) {
  if (problem.dependents_first || problem.beside_previous) {
    cudaTriggerProgrammaticLaunchCompletion();
  }
  if (problem.beside_previous) {
    return;
  }
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();  // nothing the second time
}

/// The rows that count.
struct RowSpan {
  int begin;
  int end;
};

__device__ inline RowSpan valid_rows(GatherParams const& problem) {
  int const begin = problem.first_row == nullptr ? 0 : *problem.first_row;
  int const end = problem.num_rows == nullptr ? problem.max_rows : *problem.num_rows;
  return {max(begin, 0), min(end, problem.max_rows)};
}

__device__ inline float weight_at(GatherParams const& problem, int token, int choice) {
  std::int64_t const offset = token * problem.weights_token_stride + choice * problem.weights_choice_stride;
  if (problem.weights_type == GatherWeights::FP32) {
    return static_cast<float const*>(problem.weights)[offset];
  }
  return __bfloat162float(static_cast<Element const*>(problem.weights)[offset]);
}

/// As wait_for_previous_kernel; returns which rows count, which where it may be asked before the wait takes no time.
__device__ inline RowSpan wait_and_count_rows(GatherParams const& problem) {
  RowSpan const before = problem.counted_before ? valid_rows(problem) : RowSpan{};
  wait_for_previous_kernel(problem);
  return problem.counted_before ? before : valid_rows(problem);
}

/// The rows that count, as long as a kernel is at work at them. At its begin it waits and counts; one beside the
/// previous kernel waits for that at its end, whichever way a thread leaves it.
class RowsAtWork : public RowSpan {
 public:
  __device__ explicit RowsAtWork(GatherParams const& problem)
      : RowSpan(wait_and_count_rows(problem)), problem_(problem) {}
  __device__ ~RowsAtWork() {
    if (problem_.beside_previous) {
      cudaGridDependencySynchronize();
    }
  }
  RowsAtWork(RowsAtWork const&) = delete;
  RowsAtWork& operator=(RowsAtWork const&) = delete;

 private:
  GatherParams const& problem_;
};

/// Row `index`, which need not be one of `rows`.
__device__ inline Row find_row(RowSource const& source, int index, RowSpan rows) {
  GatherParams const& problem = source.problem;
  Row row{.x = nullptr, .weight = 1.0f};
  if (index >= problem.max_rows) {
    return row;
  }
  // On its way before the count is looked at.
  int const slot = problem.row_slot == nullptr ? index : problem.row_slot[index];
  if (index < rows.begin || index >= rows.end || slot < 0) {
    return row;
  }
  int token, choice;
  source.top_k(token, choice, slot);
  if (token >= problem.num_tokens) {
    return row;
  }
  row.x = static_cast<Element const*>(problem.x) + token * problem.x_row_stride;
  if (problem.weights_type != GatherWeights::None) {
    row.weight = weight_at(problem, token, choice);
  }
  return row;
}

/// Eight values, zero where the row has none left. Not through the read-only path, which takes for granted that
/// nothing is written while this kernel runs: it may have begun before the one that writes x had ended.
__device__ inline RowVector load_row_vector(Element const* first, int left) {
  if (left <= 0) {
    return {uint4{}};
  }
  // Which a null pointer among the rows hides from the compiler.
  __builtin_assume(__isGlobal(first));
  return {*reinterpret_cast<uint4 const*>(first)};
}

__device__ inline unsigned weighted_word(unsigned word, float weight) {
  float values[2];
  quantize::unpack_word<Element>(word, values);
  __nv_bfloat162_raw const product = __floats2bfloat162_rn(values[0] * weight, values[1] * weight);
  return product.x | static_cast<unsigned>(product.y) << 16;
}

/// The products, rounded to BF16, in place of the values.
__device__ inline void apply_weight(RowVector& vector, float weight) {
  uint4& words = vector.words;
  words = {weighted_word(words.x, weight),
           weighted_word(words.y, weight),
           weighted_word(words.z, weight),
           weighted_word(words.w, weight)};
}

__device__ inline std::uint8_t* fp8_row(GatherParams const& problem, int row) {
  return static_cast<std::uint8_t*>(problem.out) + row * problem.out_row_stride;
}

__device__ inline void store_fp8(quantize::Quantized<Element> const& values, std::uint8_t* first, int left) {
  quantize::store<Element, quantize::Access::Vector>(values, first, left);
}

}  // namespace moe_ext::fused_moe::gather
