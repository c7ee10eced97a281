// A choice among kernels for both GEMMs of a layer: what each is estimated to take, corrected by how far the estimates
// were off on measured problems like this one.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "grouped_gemm/config_list.hpp"
#include "grouped_gemm/estimate.hpp"

namespace moe_ext::grouped_gemm {

/// Both GEMMs of a layer: weights (groups, 2 * intermediate, hidden), then (groups, hidden, intermediate).
struct LayerSizes {
  double rows;
  double groups;
  double hidden;
  double intermediate;
};

/// The kernels of both GEMMs, by index.
struct Kernels {
  int first;
  int second;
};

/// A measured problem: the microseconds of every choice, NaN where it was not timed.
struct MeasuredProblem {
  LayerSizes sizes;
  std::vector<double> times;
};

/// What was chosen: a position in the list of choices, its estimate, and which measured problem was nearest.
struct Chosen {
  int choice;
  double us;
  int nearest;          // -1 where no measured problem was like it
  bool second = false;  // of a GEMM: whether it is taken for a layer's second
};

class MeasuredChoices {
 public:
  /// `costs` are those of the kernels that choices name, by index; `common` what both GEMMs leave out: of a layer a
  /// constant, and for each byte of its rows' activations at the nominal rate; of two different kernels in a row
  /// another constant. A measured problem has a say as far as `radius` octaves from it, by what `kClose` says; the
  /// estimate weighs `shrink`.
  MeasuredChoices(std::vector<Kernels> choices,
                  std::map<int, Costs> const& costs,
                  std::array<double, 3> common,
                  std::vector<MeasuredProblem> const& problems,
                  int sm_count,
                  double radius,
                  double shrink)
      : choices_(std::move(choices)), common_(common), sm_count_(sm_count), radius_(radius), shrink_(shrink) {
    for (Kernels const& kernels : choices_) {
      firsts_.push_back(position_of(kernels.first, costs));
      seconds_.push_back(position_of(kernels.second, costs));
    }
    for (MeasuredProblem const& problem : problems) {
      add(problem);
    }
    auto const fewer_rows = [](Point const& a, Point const& b) { return a.place[0] < b.place[0]; };
    std::stable_sort(points_.begin(), points_.end(), fewer_rows);
  }

  /// The best choice among those of `allowed`, a bit each, for both GEMMs of a layer.
  Chosen choose(LayerSizes const& sizes, int sm_count, std::uint64_t allowed) const {
    if (sizes.rows <= 0 || sizes.hidden <= 0 || sizes.intermediate <= 0) {
      return first_of(allowed);
    }
    double sums[kMostChoices] = {};
    double weights[kMostChoices] = {};
    int nearest = -1;
    if (sm_count == sm_count_) {
      nearest = gather(place_of(sizes), sums, weights);
    }
    double times[kMostChoices];
    estimate(sizes, sm_count, times);
    Chosen best{-1, std::numeric_limits<double>::infinity(), nearest};
    for (int index = 0; index < static_cast<int>(choices_.size()); ++index) {
      double const us = times[index] * std::exp(sums[index] / (weights[index] + shrink_));
      if ((allowed >> index & 1) != 0 && us < best.us) {
        best.choice = index;
        best.us = us;
      }
    }
    return best;
  }

  /// The same for one GEMM, which is taken for one of a layer's two: so both get one answer.
  Chosen choose_gemm(GemmSizes const& gemm, int sm_count, std::uint64_t allowed) const {
    Layer const layer = layer_of(gemm.n, gemm.k);
    Chosen chosen = choose({gemm.rows, gemm.groups, layer.hidden, layer.intermediate}, sm_count, allowed);
    chosen.second = gemm.k != layer.hidden || gemm.n != 2 * layer.intermediate;
    return chosen;
  }

  /// The kernels of a choice.
  Kernels const& kernels_of(int choice) const {
    return choices_.at(static_cast<std::size_t>(choice));
  }

 private:
  static constexpr int kMostChoices = 64;
  static constexpr int kMostKernels = 32;
  // No correction is larger: times of kernels that were given up early are rough.
  static constexpr double kMostCorrection = 0.5;

  // Squared octaves: a problem this far off has half the say of one that is the same.
  static constexpr double kClose = 0.1;

  // Of a choice that was not timed over the best that was.
  static constexpr double kUntimed = 1.02;

  // The say of a problem's own times, beside which no other's counts.
  static constexpr double kSame = 1e4;

  static constexpr double kMostHidden = 8192;
  // A hidden size over an intermediate size is mostly more than this, as is twice this one over that: between the two
  // either may be the other.
  static constexpr double kClosest = 1.65;

  /// What makes problems alike, in octaves: rows of a group, all rows, hidden and intermediate size.
  using Place = std::array<double, 4>;
  static constexpr Place kWeights = {1, 0.5, 0.5, 0.5};

  struct Layer {
    double hidden;
    double intermediate;
  };

  /// The layer that weights (n, k) are likely of: one that was measured, or else by shape. Weights of no more rows than
  /// K are most often the first's, as are those of more rows than hidden states have features; between these the size
  /// that is a measured layer's hidden one decides, and of two that are close the rounder: 2816 x 2048 is a first's.
  Layer layer_of(double n, double k) const {
    if (auto const known = layers_.find({n, k}); known != layers_.end()) {
      return known->second;
    }
    bool const k_is_hidden = hidden_sizes_.count(k) != 0 && hidden_sizes_.count(n) == 0;
    bool const k_is_rounder = n < kClosest * k && power_of_two_in(k) > power_of_two_in(n);
    return n <= k || n > kMostHidden || k_is_hidden || k_is_rounder ? Layer{k, n / 2} : Layer{n, k};
  }

  /// The largest power of two that divides a size.
  static std::int64_t power_of_two_in(double size) {
    auto const whole = static_cast<std::int64_t>(size);
    return whole & -whole;
  }

  struct Kernel {
    Config const* config;
    Costs costs;
    int tiling;  // position among kernels that cut tokens differently
  };

  struct Point {
    Place place;
    int number;              // among the problems that were given
    std::vector<float> off;  // log of measured over estimated, less the mean; NaN where not timed
  };

  static Place place_of(LayerSizes const& sizes) {
    return {std::log2(sizes.rows / sizes.groups),
            std::log2(sizes.rows),
            std::log2(sizes.hidden),
            std::log2(sizes.intermediate)};
  }

  int position_of(int index, std::map<int, Costs> const& costs) {
    if (index < 0 || index >= kNumConfigs || costs.count(index) == 0 || choices_.size() > kMostChoices) {
      throw std::out_of_range("choices must be at most 64, of compiled kernels with costs, got kernel " +
                              std::to_string(index) + " in " + std::to_string(choices_.size()) + " choices");
    }
    Config const* config = &kConfigs[index];
    for (std::size_t position = 0; position < kernels_.size(); ++position) {
      if (kernels_[position].config == config) {
        return static_cast<int>(position);
      }
    }
    int tiling = 0;
    while (tiling < static_cast<int>(tilings_.size()) &&
           !(tilings_[tiling]->tile_tokens == config->tile_tokens &&
             is_swapped(tilings_[tiling]->order) == is_swapped(config->order))) {
      ++tiling;
    }
    if (tiling == static_cast<int>(tilings_.size())) {
      tilings_.push_back(config);
    }
    if (kernels_.size() == kMostKernels) {
      throw std::out_of_range("choices must name at most 32 kernels");
    }
    kernels_.push_back({config, costs.at(index), tiling});
    return static_cast<int>(kernels_.size()) - 1;
  }

  Chosen first_of(std::uint64_t allowed) const {
    int index = 0;
    while (index + 1 < static_cast<int>(choices_.size()) && (allowed >> index & 1) == 0) {
      ++index;
    }
    return {index, 0, -1};
  }

  void estimate(LayerSizes const& sizes, int sm_count, double* times) const {
    double const active = active_groups(sizes.rows, sizes.groups);
    TokenTiling tokens[kMostKernels];
    for (std::size_t index = 0; index < tilings_.size(); ++index) {
      tokens[index] = tile_tokens_of(*tilings_[index], sizes.rows, active);
    }
    GemmSizes const first{sizes.rows, sizes.groups, 2 * sizes.intermediate, sizes.hidden};
    GemmSizes const second{sizes.rows, sizes.groups, sizes.hidden, sizes.intermediate};
    double of_first[kMostKernels];
    double of_second[kMostKernels];
    for (std::size_t index = 0; index < kernels_.size(); ++index) {
      Kernel const& kernel = kernels_[index];
      TokenTiling const& tiling = tokens[kernel.tiling];
      of_first[index] = time_us(kernel.costs, terms_of(*kernel.config, first, active, tiling, sm_count));
      of_second[index] = time_us(kernel.costs, terms_of(*kernel.config, second, active, tiling, sm_count));
    }
    double const bytes = sizes.rows * (2 * sizes.hidden + sizes.intermediate);
    double const common = common_[0] + common_[1] * bytes * kReadUsPerByte;
    for (std::size_t index = 0; index < choices_.size(); ++index) {
      double const different = firsts_[index] == seconds_[index] ? 0 : common_[2];
      times[index] = common + different + of_first[firsts_[index]] + of_second[seconds_[index]];
    }
  }

  /// Whether a time is the lesser one; NaN is none.
  static bool less(double a, double b) {
    return a < b || (!std::isnan(a) && std::isnan(b));
  }

  void add(MeasuredProblem const& problem) {
    if (problem.times.size() != choices_.size()) {
      throw std::out_of_range("a measured problem must have a time for each of " +
                              std::to_string(choices_.size()) + " choices, got " +
                              std::to_string(problem.times.size()));
    }
    double times[kMostChoices];
    estimate(problem.sizes, sm_count_, times);
    Point point{place_of(problem.sizes), static_cast<int>(points_.size()), {}};
    double sum = 0;
    int timed = 0;
    for (std::size_t index = 0; index < choices_.size(); ++index) {
      double const off = std::log(problem.times[index] / times[index]);
      point.off.push_back(static_cast<float>(off));
      if (!std::isnan(off)) {
        sum += off;
        ++timed;
      }
    }
    double const mean = sum / timed;
    double const best = *std::min_element(problem.times.begin(), problem.times.end(), less);
    for (std::size_t index = 0; index < choices_.size(); ++index) {
      float& off = point.off[index];
      // What was not timed is taken to be no better than what was, however far off its estimate.
      double const least = std::log(kUntimed * best / times[index]);
      if (std::isnan(off) && least > mean) {
        off = static_cast<float>(least - mean);
      } else {
        off = static_cast<float>(std::clamp(off - mean, -kMostCorrection, kMostCorrection));
      }
    }
    points_.push_back(std::move(point));
    Layer const layer{problem.sizes.hidden, problem.sizes.intermediate};
    layers_.insert({{2 * layer.intermediate, layer.hidden}, layer});
    layers_.insert({{layer.hidden, layer.intermediate}, layer});
    hidden_sizes_.insert(layer.hidden);
  }

  /// Add up how far estimates were off on problems like this one, and return the nearest.
  int gather(Place const& place, double* sums, double* weights) const {
    double const limit = radius_ * radius_;
    double least = limit;
    int nearest = -1;
    auto const before = [](Point const& point, double rows) { return point.place[0] < rows; };
    auto point = std::lower_bound(points_.begin(), points_.end(), place[0] - radius_, before);
    for (; point != points_.end() && point->place[0] <= place[0] + radius_; ++point) {
      double distance = 0;
      for (std::size_t axis = 0; axis < place.size(); ++axis) {
        double const apart = place[axis] - point->place[axis];
        distance += kWeights[axis] * apart * apart;
      }
      if (distance >= limit) {
        continue;
      }
      if (distance < least) {
        least = distance;
        nearest = point->number;
      }
      double const fade = 1 - distance / limit;
      bool const same = distance == 0;
      double const weight = same ? kSame : fade * fade / (distance + kClose);
      for (std::size_t index = 0; index < choices_.size(); ++index) {
        bool const known = !std::isnan(point->off[index]);
        if (known) {
          sums[index] += weight * point->off[index];
        }
        if (known || same) {
          weights[index] += weight;
        }
      }
    }
    return nearest;
  }

  std::vector<Kernels> choices_;
  std::vector<int> firsts_, seconds_;   // positions in `kernels_`, by choice
  std::vector<Kernel> kernels_;         // each once
  std::vector<Config const*> tilings_;  // one of each way to cut tokens
  std::array<double, 3> common_;
  std::vector<Point> points_;                          // in order of rows a group, whose weight is 1
  std::map<std::pair<double, double>, Layer> layers_;  // by n and k of either GEMM
  std::set<double> hidden_sizes_;
  int sm_count_;
  double radius_;
  double shrink_;
};

}  // namespace moe_ext::grouped_gemm
