// How many experts of a layer have which precisions, and where their rows lie. Host arithmetic alone.
#pragma once

#include <array>
#include <cstdint>

namespace moe_ext::fused_moe {

/// Experts by the precisions of their stages, in the order of their rows: neighbours differ in one stage, so that those
/// with a stage in one precision are neighbours too, but for down in FP8, which the first and the last part have.
struct MixedParts {
  std::int64_t both_fp8;
  std::int64_t gate_up_fp8;  // down in BF16
  std::int64_t both_bf16;
  std::int64_t down_fp8;  // gate_up in BF16

  bool operator==(MixedParts const&) const = default;
};

/// Experts that one launch runs a stage of: neighbours in the order of rows and among the slots of their weights.
struct PlaceRange {
  std::int64_t place;  // of the first, among all experts
  std::int64_t slot;   // of the first, among those of the stage in this precision
  std::int64_t count;  // 0: no launch
};

constexpr std::int64_t count_all(MixedParts const& parts) {
  return parts.both_fp8 + parts.gate_up_fp8 + parts.both_bf16 + parts.down_fp8;
}

constexpr PlaceRange fp8_gate_up(MixedParts const& parts) {
  return {0, 0, parts.both_fp8 + parts.gate_up_fp8};
}

constexpr PlaceRange bf16_gate_up(MixedParts const& parts) {
  return {parts.both_fp8 + parts.gate_up_fp8, 0, parts.both_bf16 + parts.down_fp8};
}

constexpr PlaceRange bf16_down(MixedParts const& parts) {
  return {parts.both_fp8, 0, parts.gate_up_fp8 + parts.both_bf16};
}

/// One range where nothing lies between the two parts.
constexpr std::array<PlaceRange, 2> fp8_down(MixedParts const& parts) {
  if (bf16_down(parts).count == 0) {
    return {PlaceRange{0, 0, parts.both_fp8 + parts.down_fp8}, PlaceRange{}};
  }
  return {PlaceRange{0, 0, parts.both_fp8},
          PlaceRange{count_all(parts) - parts.down_fp8, parts.both_fp8, parts.down_fp8}};
}

}  // namespace moe_ext::fused_moe
