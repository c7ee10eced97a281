// How long a kernel takes for a GEMM, from host numbers: its tiles, waves, bytes and products, each times what the
// kernel was measured to need for it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>

#include "grouped_gemm/config.hpp"

namespace moe_ext::grouped_gemm {

/// A GEMM over rows that fall on any group with the same chance. Real numbers, as sizes can be those of a likely
/// partner of a GEMM.
struct GemmSizes {
  double rows;
  double groups;
  double n;
  double k;
};

/// What a GEMM's tiles are made of, for one width of token tile.
struct TokenTiling {
  double tiles;    // of all groups that have rows
  double columns;  // that a tile's products are computed for, the mean
};

/// Terms of a kernel's time: each a time in microseconds at a nominal rate, or a number of events.
/// waves of CTAs, their steps of 256 bytes along K, products, bytes of weights, what SMs read, bytes of activations.
inline constexpr int kNumTerms = 6;
using Terms = std::array<double, kNumTerms>;

/// What one kernel needs for each term, before it what a launch takes: `bench/tune_fit.py` fits them.
using Costs = std::array<double, kNumTerms + 1>;

// Rates of one H200 (132 SMs): docs/architecture.md says how they were measured.
inline constexpr double kReadBytesPerUs = 4.5e6;
inline constexpr double kReadUsPerByte = 1 / kReadBytesPerUs;
inline constexpr double kFlopsPerUs[] = {720e6, 1350e6};  // BF16, FP8
inline constexpr double kRateSms = 132;
// What one SM reads when its neighbours are idle: about 96 KiB in flight, 1.2 us there and back.
inline constexpr double kSmReadBytesPerUs = 80e3;

/// std::ceil of what is not negative: a few instructions where that is a call.
inline double round_up(double value) {
  auto const whole = static_cast<double>(static_cast<std::int64_t>(value));
  return whole < value ? whole + 1 : whole;
}

/// Groups that own a row.
inline double active_groups(double rows, double groups) {
  return rows <= 0 ? 0 : groups * (1 - std::pow(1 - 1 / groups, rows));
}

/// Cut groups of unequal sizes into token tiles. Their spread over a mean group's is that of mildly skewed routing.
inline TokenTiling tile_tokens_of(Config const& config, double rows, double active) {
  static constexpr double kSpread[] = {0.55, 0.8, 1.05, 1.6};
  double tiles = 0;
  double columns = 0;
  for (double const spread : kSpread) {
    double const share = std::max(rows / active * spread, 1.0);
    double const count = round_up(share / config.tile_tokens);
    double width = config.tile_tokens;
    if (is_swapped(config.order)) {
      width = std::min(width, 8 * round_up(round_up(share / count) / 8));
      // Under 64 columns WGMMA waits for its 64-row operand: reading that takes as long as 32 columns.
      width = std::max(width, 32 + width / 2);
    }
    tiles += count;
    columns += count * width;
  }
  return {active * tiles / std::size(kSpread), columns / tiles};
}

/// Work out the terms of a GEMM's time.
inline Terms terms_of(
    Config const& config, GemmSizes const& gemm, double active, TokenTiling tokens, int sm_count) {
  // A choice works this out some thirty times: of divisions there are few.
  double const item = config.dtype == Dtype::BF16 ? 2 : 1;
  double const per_sm_count = 1.0 / sm_count;
  double const weight_tiles = round_up(gemm.n / config.tile_weights);
  double const ctas = tokens.tiles * weight_tiles * config.split_k;
  double const steps = round_up(gemm.k * item / (config.tile_k_bytes * config.split_k));
  double const k_bytes = steps * config.tile_k_bytes;  // of one CTA
  // How full the last wave is differs with the routing: beyond two waves it counts for a part.
  double const share = ctas * per_sm_count / config.ctas_per_sm;
  double const whole = round_up(share);
  double const waves = share > 2 ? share + 0.5 * (whole - share) + 0.25 : whole;
  double per_sm = std::max(1.0, ctas * per_sm_count);
  per_sm = std::max(per_sm, std::min(round_up(per_sm), per_sm + 0.3));
  double const products = config.tile_weights * tokens.columns * k_bytes;
  double const us_per_product =
      config.dtype == Dtype::FP8 ? 2 * kRateSms / kFlopsPerUs[1] : kRateSms / kFlopsPerUs[0];
  return {
      waves,
      waves * k_bytes * (1.0 / 256),
      per_sm * products * us_per_product,
      active * gemm.n * gemm.k * item * kReadUsPerByte,
      ctas * (config.tile_weights + tokens.columns) * k_bytes * per_sm_count * (1 / kSmReadBytesPerUs),
      gemm.rows * (gemm.k * item + 2 * gemm.n) * kReadUsPerByte,
  };
}

/// Add up a kernel's time. Of latency, products, weights and what SMs read, the longest hides most of the others: a
/// norm of the fourth order.
inline double time_us(Costs const& costs, Terms const& terms) {
  auto const fourth = [](double value) { return value * value * value * value; };
  double const latency = costs[1] * terms[0] + costs[2] * terms[1];
  double const sum = fourth(latency) + fourth(costs[3] * terms[2]) + fourth(costs[4] * terms[3]) +
                     fourth(costs[5] * terms[4]);
  return costs[0] + std::sqrt(std::sqrt(sum)) + costs[6] * terms[5];
}

}  // namespace moe_ext::grouped_gemm
