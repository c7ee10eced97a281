// moe_ext._planner: the list of kernels and the host twin of the device tile scheduler, for machines without a GPU.
#include <tuple>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "grouped_gemm/config_list.hpp"
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

}  // namespace
}  // namespace moe_ext::grouped_gemm

PYBIND11_MODULE(_planner, m) {
  namespace gg = moe_ext::grouped_gemm;
  m.doc() = "Compiled kernels and the host twin of the device tile scheduler.";
  m.def("configs_csv", &gg::configs_csv, "All compiled kernels, one line each after a header.");
  m.def("plan",
        &gg::plan,
        py::arg("offs"),
        py::arg("num_rows"),
        py::arg("n"),
        py::arg("config"),
        py::arg("sm_count"));
  m.def("tiles", &gg::tiles, py::arg("offs"), py::arg("num_rows"), py::arg("n"), py::arg("config"));
}
