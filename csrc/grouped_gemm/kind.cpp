// The twin of `has_blocks` and `block_kind` in python/moe_ext/_scales.py, which choose a kernel at the first call of a
// problem. `launch_with` refuses a choice of another kind than this one, so a difference shows at once.
#include "grouped_gemm/kind.hpp"

#include "common/check.hpp"

namespace moe_ext::grouped_gemm {
namespace {

/// Whether scales are per block: by their shapes, or because something is said of their grid. Shapes that fit no
/// layout may give either; the checks refuse them.
bool has_blocks(Call const& call, Sizes const& sizes) {
  if (call.n_segments != 1 || call.n_offset != 0 || call.k_offset != 0) {
    return true;
  }
  std::int64_t const row_dims = sizes.masked ? 2 : 1;
  if (call.scale_a.has_value() && call.scale_a->dim() == row_dims + 1 && call.scale_a->size(row_dims) != 1) {
    return true;
  }
  if (!call.scale_b.has_value()) {
    return false;
  }
  std::int64_t const dims = call.scale_b->dim();
  if (dims < 3) {
    return false;
  }
  std::int64_t const one = call.scale_b->size(1);
  return dims == 4 || call.scale_b->size(2) != 1 || (one != 1 && one != sizes.n);
}

}  // namespace

Kind kind_of(Call const& call, Sizes const& sizes, Dtype dtype, bool fast) {
  if (dtype == Dtype::BF16) {
    check_value(!fast, "grouped_gemm: `accumulate` must be \"promoted\" for bfloat16 operands, got \"fast\"");
    return {dtype, Accumulate::FP32, false};
  }
  if (!has_blocks(call, sizes)) {
    return {dtype, fast ? Accumulate::Fast : Accumulate::Promoted, false};
  }
  check_value(!fast, "grouped_gemm: `accumulate` must be \"promoted\" with scales per block, got \"fast\"");
  if (call.k_offset != 0) {
    return {dtype, Accumulate::Shifted, false};
  }
  bool const aligned = call.n_offset == 0 && (call.n_segments == 1 || sizes.n / 2 % kScaleBlock == 0);
  return {dtype, Accumulate::Block, !aligned};
}

}  // namespace moe_ext::grouped_gemm
