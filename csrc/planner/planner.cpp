// moe_ext._planner: the list of kernels, the host twin of the device tile scheduler, the choice among measured kernels,
// and what the library derives of a layer's sizes, for machines without a GPU.
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "fused_moe/mixed_order.hpp"
#include "fused_moe/mixed_workspace.hpp"
#include "fused_moe/weight_scale.hpp"
#include "fused_moe/workspace_layout.hpp"
#include "grouped_gemm/config_list.hpp"
#include "grouped_gemm/estimate.hpp"
#include "grouped_gemm/measured_choices.hpp"
#include "grouped_gemm/tiling.hpp"

namespace py = pybind11;

namespace moe_ext::grouped_gemm {
namespace {

using TileTuple = std::tuple<int, std::int64_t, int, int, int>;

struct GroupPlan {
  RowRange rows;
  TokenTiles tiles;
};

/// split_tokens for a kernel known by index: the same instantiation the device runs.
TokenTiles split_tokens_of(int config, int rows) {
  using Split = TokenTiles (*)(int);
  static constexpr Split kSplit[] = {
#define MOE_EXT_CONFIG(id_, ...) &split_tokens<configs::id_>,
#include "grouped_gemm/configs.def"
#undef MOE_EXT_CONFIG
  };
  return kSplit[config](rows);
}

Config const& config_at(int config) {
  if (config < 0 || config >= kNumConfigs) {
    throw std::out_of_range("config must be in [0, " + std::to_string(kNumConfigs) + "), got " +
                            std::to_string(config));
  }
  return kConfigs[config];
}

std::vector<GroupPlan> plan_groups(std::vector<int> const& offs, int num_rows, int config) {
  std::vector<GroupPlan> groups;
  int begin = 0;
  for (int const end : offs) {
    RowRange const rows = clamp_rows(begin, end, num_rows);
    groups.push_back({rows, split_tokens_of(config, rows.end - rows.begin)});
    begin = end;
  }
  return groups;
}

py::dict plan(std::vector<int> const& offs, int num_rows, std::int64_t n, int config_index, int sm_count) {
  Config const& config = config_at(config_index);
  std::vector<int> widths;
  std::vector<int> counts;
  std::int64_t steps = 0;
  std::int64_t padded_rows = 0;
  for (GroupPlan const& group : plan_groups(offs, num_rows, config_index)) {
    widths.push_back(group.tiles.width);
    counts.push_back(group.tiles.count);
    steps += std::int64_t{group.tiles.count} * count_weight_tiles(config, n);
    padded_rows += std::int64_t{group.tiles.count} * group.tiles.width - (group.rows.end - group.rows.begin);
  }
  py::dict result;
  result["num_tiles"] = steps;
  result["waves"] = static_cast<double>(steps) / static_cast<double>(resident_clusters(config, sm_count));
  result["padded_rows"] = padded_rows;
  result["grid"] = grid_size(config, sm_count, num_rows, static_cast<std::int64_t>(offs.size()), n);
  result["token_widths"] = widths;
  result["token_tiles"] = counts;
  return result;
}

/// (group, weight_begin, token_begin, token_width, token_end) of every tile, in the device's order.
std::vector<TileTuple> tiles(std::vector<int> const& offs, int num_rows, std::int64_t n, int config_index) {
  Config const& config = config_at(config_index);
  std::vector<TileTuple> result;
  int const weight_tiles = count_weight_tiles(config, n);
  int group_index = 0;
  for (GroupPlan const& group : plan_groups(offs, num_rows, config_index)) {
    for (unsigned index = 0; index < count_group_steps(group.tiles.count, weight_tiles); ++index) {
      Tile const tile = tile_in_group(group_index, group.rows, group.tiles, weight_tiles, index);
      std::int64_t const weight_begin = std::int64_t{tile.weight_tile} * config.tile_weights;
      result.emplace_back(tile.group, weight_begin, tile.token_begin, tile.token_width, tile.token_end);
    }
    ++group_index;
  }
  return result;
}

/// What a kernel's time for a GEMM is made of, see `terms_of`.
Terms gemm_terms(int config_index, double rows, double groups, double n, double k, int sm_count) {
  Config const& config = config_at(config_index);
  double const active = active_groups(rows, groups);
  return terms_of(config, {rows, groups, n, k}, active, tile_tokens_of(config, rows, active), sm_count);
}

using ChosenTuple = std::tuple<int, double, int>;

ChosenTuple tuple_of(Chosen const& chosen) {
  return {chosen.choice, chosen.us, chosen.nearest};
}

void bind_choices(py::module_& m) {
  using Sizes = std::array<double, 4>;
  using Problem = std::pair<Sizes, std::vector<double>>;
  auto const make = [](std::vector<std::pair<int, int>> const& choices,
                       std::map<int, Costs> const& costs,
                       std::array<double, 3> common,
                       std::vector<Problem> const& problems,
                       int sm_count,
                       double radius,
                       double shrink) {
    std::vector<Kernels> kernels;
    for (auto const& [first, second] : choices) {
      kernels.push_back({first, second});
    }
    std::vector<MeasuredProblem> measured;
    for (auto const& [sizes, times] : problems) {
      measured.push_back({{sizes[0], sizes[1], sizes[2], sizes[3]}, times});
    }
    return MeasuredChoices(std::move(kernels), costs, common, measured, sm_count, radius, shrink);
  };
  auto const choose = [](MeasuredChoices const& self,
                         double rows,
                         double groups,
                         double hidden,
                         double intermediate,
                         int sm_count,
                         std::uint64_t allowed) {
    return tuple_of(self.choose({rows, groups, hidden, intermediate}, sm_count, allowed));
  };
  auto const choose_gemm = [](MeasuredChoices const& self,
                              double rows,
                              double groups,
                              double n,
                              double k,
                              int sm_count,
                              std::uint64_t allowed) {
    Chosen const chosen = self.choose_gemm({rows, groups, n, k}, sm_count, allowed);
    return std::tuple_cat(tuple_of(chosen), std::make_tuple(chosen.second));
  };
  py::class_<MeasuredChoices>(m, "MeasuredChoices")
      .def(py::init(make),
           py::arg("choices"),
           py::arg("costs"),
           py::arg("common"),
           py::arg("problems"),
           py::arg("sm_count"),
           py::arg("radius"),
           py::arg("shrink"))
      .def("choose", choose)
      .def("choose_gemm", choose_gemm);
}

}  // namespace
}  // namespace moe_ext::grouped_gemm

namespace moe_ext::fused_moe {
namespace {

/// The fields of Python's WorkspaceLayout by name.
py::dict layout_dict(std::int64_t num_slots,
                     std::int64_t hidden_size,
                     std::int64_t intermediate_size,
                     std::int64_t num_experts,
                     bool fp8) {
  WorkspaceLayout const layout =
      workspace_layout(num_slots, hidden_size, intermediate_size, num_experts, fp8);
  py::dict result;
  result["offs"] = layout.offs;
  result["listed"] = layout.listed;
  result["row_slot"] = layout.row_slot;
  result["slot_row"] = layout.slot_row;
  result["gathered"] = layout.gathered;
  result["gathered_scale"] = layout.gathered_scale;
  result["intermediate"] = layout.intermediate;
  result["quantised"] = layout.quantised;
  result["quantised_row_bytes"] = layout.quantised_row_bytes;
  result["quantised_scale"] = layout.quantised_scale;
  result["quantised_scale_row_bytes"] = layout.quantised_scale_row_bytes;
  result["in_place"] = layout.in_place;
  result["rows"] = layout.rows;
  result["total"] = layout.total;
  return result;
}

/// Granularity, as Python names it, and segments; none where the shape fits no layout.
std::optional<std::pair<std::string, std::int64_t>> named_weight_scale(std::vector<std::int64_t> const& shape,
                                                                       std::int64_t num_experts,
                                                                       std::int64_t n,
                                                                       std::int64_t k) {
  std::optional<WeightScale> const scale = weight_scale_of(shape, num_experts, n, k);
  if (!scale.has_value()) {
    return std::nullopt;
  }
  static constexpr char const* kNames[] = {"none", "tensor", "row", "1x128"};
  return std::pair(kNames[static_cast<std::size_t>(scale->granularity)], scale->n_segments);
}

}  // namespace
}  // namespace moe_ext::fused_moe

PYBIND11_MODULE(_planner, m) {
  namespace gg = moe_ext::grouped_gemm;
  namespace layer = moe_ext::fused_moe;
  m.doc() = "Compiled kernels, the host twin of the device tile scheduler, and a layer's sizes.";
  m.def("configs_csv", &gg::configs_csv, "All compiled kernels, one line each after a header.");
  m.def(
      "are_few",
      [](std::int64_t bf16_experts, std::int64_t num_experts) {
        return layer::are_few({.slots = 0, .num_experts = num_experts, .bf16_experts = bf16_experts});
      },
      py::arg("bf16_experts"),
      py::arg("num_experts"),
      "Whether a stage of a mixture has so few experts in BF16 that their GEMM only comes beside the other.");
  m.def(
      "spared_ctas",
      [](std::int64_t slots,
         std::int64_t num_experts,
         std::int64_t bf16_experts,
         int config,
         std::int64_t sm_count) {
        return layer::spared_ctas({slots, num_experts, bf16_experts}, gg::config_at(config), sm_count);
      },
      py::arg("slots"),
      py::arg("num_experts"),
      py::arg("bf16_experts"),
      py::arg("config"),
      py::arg("sm_count"),
      "CTAs that a GEMM in FP8 leaves one of a few experts in BF16.");
  m.def("plan",
        &gg::plan,
        py::arg("offs"),
        py::arg("num_rows"),
        py::arg("n"),
        py::arg("config"),
        py::arg("sm_count"));
  m.def("tiles", &gg::tiles, py::arg("offs"), py::arg("num_rows"), py::arg("n"), py::arg("config"));
  m.def("gemm_terms",
        &gg::gemm_terms,
        py::arg("config"),
        py::arg("rows"),
        py::arg("groups"),
        py::arg("n"),
        py::arg("k"),
        py::arg("sm_count"));
  gg::bind_choices(m);
  m.def("workspace_layout",
        &layer::layout_dict,
        py::arg("num_slots"),
        py::arg("hidden_size"),
        py::arg("intermediate_size"),
        py::arg("num_experts"),
        py::arg("fp8"));
  m.def("workspace_bytes",
        &layer::workspace_bytes,
        py::arg("num_slots"),
        py::arg("hidden_size"),
        py::arg("intermediate_size"),
        py::arg("num_experts"));
  m.def("mixed_workspace_bytes",
        &layer::mixed_workspace_bytes,
        py::arg("num_tokens"),
        py::arg("top_k"),
        py::arg("hidden_size"),
        py::arg("intermediate_size"),
        py::arg("num_experts"));
  m.def("weight_scale_of",
        &layer::named_weight_scale,
        py::arg("shape"),
        py::arg("num_experts"),
        py::arg("n"),
        py::arg("k"));
}
