// How the rows of a group are cut into token tiles: shared by the device tile scheduler and its host twin.
#pragma once

#include <cstdint>

#include "common/math.hpp"
#include "grouped_gemm/config.hpp"

namespace moe_ext::grouped_gemm {

inline constexpr int kNumTokenWidths = 13;

/// Token tile widths that have a main loop (WGMMA's N under Swap-AB), ascending.
MOE_EXT_HOST_DEVICE constexpr int token_width(int index) {
  constexpr int kWidths[kNumTokenWidths] = {8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256};
  return kWidths[index];
}

/// Whether `config` has tiles of `width` tokens: a main loop each under Swap-AB. In plain order, where tokens sit on M,
/// all of tile_tokens are multiplied, but no more than the width are loaded.
MOE_EXT_HOST_DEVICE constexpr bool has_token_width(Config const& config, int width) {
  return width <= config.tile_tokens;
}

/// The rows [begin, end) of one group, clamped into the tensor whatever the offsets hold.
struct RowRange {
  int begin;
  int end;
};

MOE_EXT_HOST_DEVICE constexpr int clamp_row(int row, int num_rows) {
  return row < 0 ? 0 : (row > num_rows ? num_rows : row);
}

MOE_EXT_HOST_DEVICE constexpr RowRange clamp_rows(int begin, int end, int num_rows) {
  begin = clamp_row(begin, num_rows);
  end = clamp_row(end, num_rows);
  return {begin, end < begin ? begin : end};
}

/// The same in the masked layout: group `group` begins at its own max_rows rows, `count` of which count.
MOE_EXT_HOST_DEVICE constexpr RowRange masked_rows(int group, int count, int max_rows) {
  int const begin = group * max_rows;
  return {begin, begin + clamp_row(count, max_rows)};
}

/// A piece of a group that has rows, as whoever wrote `offs` may list them too: at most kListedRows of its rows.
struct alignas(16) ListedRows {
  int group;  // -1: none
  int begin;
  int end;
};

/// No more than a token tile of any kernel that takes a list.
inline constexpr int kListedRows = 16;

/// Where the rows of each group lie. Contiguous: offs[g] is the end row of group g, its first that of the group
/// before. Masked: group g has max_rows rows, the first offs[g] of which count.
struct GroupRows {
  int const* offs;  // (num_groups,) end rows, or counts
  int num_groups;
  int num_rows;  // of `a`
  int max_rows;  // 0: contiguous
  /// Contiguous: group 0 begins at row offs[-1], where another launch's groups end, not at row 0.
  bool continues = false;
  /// Not null, contiguous: (num_rows,), all rows in pieces, by group, and then none. Kernels that can (`takes_list`)
  /// find a tile there by one division, and do not read `offs`. Group 0 is group `first_listed` there.
  ListedRows const* listed = nullptr;
  int first_listed = 0;
};

/// The entry of `offs` that the first row of a group comes from, contiguous.
MOE_EXT_HOST_DEVICE constexpr int end_before(GroupRows const& groups, int group) {
  return group > 0 || groups.continues ? groups.offs[group - 1] : 0;
}

/// Whether no group owns a row, contiguous.
MOE_EXT_HOST_DEVICE constexpr bool has_no_rows(GroupRows const& groups) {
  return groups.offs[groups.num_groups - 1] <= end_before(groups, 0);
}

/// The rows of a group, from its entry of `offs` and, contiguous, the one before it (end_before).
MOE_EXT_HOST_DEVICE constexpr RowRange rows_of(GroupRows const& groups, int group, int before, int end) {
  return groups.max_rows > 0 ? masked_rows(group, end, groups.max_rows)
                             : clamp_rows(before, end, groups.num_rows);
}

/// A group's rows as `count` tiles of `width` tokens each; the last one may be ragged.
struct TokenTiles {
  int count;
  int width;
};

/// The smallest compiled width that holds `rows`, at most tile_tokens.
template <class ConfigTag>
MOE_EXT_HOST_DEVICE constexpr int smallest_width(int rows) {
  constexpr Config kConfig = ConfigTag::value;
  int width = kConfig.tile_tokens;
  for (int i = kNumTokenWidths - 1; i >= 0; --i) {
    if (has_token_width(kConfig, token_width(i)) && token_width(i) >= rows) {
      width = token_width(i);
    }
  }
  return width;
}

/// The fewest tiles that hold `rows`, each of the smallest width that holds an even share: 130 rows are
/// two tiles of 80 where tiles have up to 128 tokens, not one of 128 and one of 2.
template <class ConfigTag>
MOE_EXT_HOST_DEVICE constexpr TokenTiles split_tokens(int rows) {
  constexpr int kTileTokens = ConfigTag::value.tile_tokens;
  if (rows <= 0) {
    return {0, 0};
  }
  if (rows <= kTileTokens) {  // without a division
    return {1, smallest_width<ConfigTag>(rows)};
  }
  int const most = (rows - 1) / kTileTokens + 1;
  int const width = smallest_width<ConfigTag>((rows - 1) / most + 1);
  return {(rows - 1) / width + 1, width};
}

/// Weight tiles of one group.
MOE_EXT_HOST_DEVICE constexpr int count_weight_tiles(Config const& config, std::int64_t n) {
  return static_cast<int>(ceil_div(n, config.tile_weights));
}

/// What one CTA computes in one step.
struct Tile {
  int group;        // -1: no more work
  int weight_tile;  // index within the group
  int token_begin;  // first row of `a`
  int token_end;    // one past the last row that may be stored
  int token_width;  // rows loaded and multiplied
};

/// Tokens of a band. CTAs that work at the same time share a band's tokens and about as many rows of weights: 132
/// tiles of 128 x 256 make a square of about 2,048 x 2,048, the shape with the least memory traffic
/// (docs/notes/tile-order.md has the measurement).
inline constexpr int kBandTokens = 2048;

/// Token tiles of each band but the last: a group in bands of about kBandTokens, as even as may be.
MOE_EXT_HOST_DEVICE constexpr int count_band_tiles(TokenTiles tiles) {
  unsigned const tokens = static_cast<unsigned>(tiles.count) * static_cast<unsigned>(tiles.width);
  int const bands = static_cast<int>((tokens + kBandTokens / 2) / kBandTokens);
  return bands <= 1 ? tiles.count : (tiles.count + bands - 1) / bands;
}

/// Tile `index` of a group whose rows are `rows`. Within a band token tiles run fastest: CTAs that work at the
/// same time share weight tiles, so a band reads each weight from memory once and its tokens stay in L2.
MOE_EXT_HOST_DEVICE constexpr Tile tile_in_group(
    int group, RowRange rows, TokenTiles tiles, int weight_tiles, unsigned index) {
  if (tiles.count == 1) {  // most groups in decode, where each tile is short and this division would show
    return {group, static_cast<int>(index), rows.begin, rows.end, tiles.width};
  }
  int const band_tiles = count_band_tiles(tiles);
  int first = 0;  // token tile of the band
  int count = tiles.count;
  if (band_tiles < tiles.count) {
    unsigned const band_steps = static_cast<unsigned>(band_tiles) * static_cast<unsigned>(weight_tiles);
    unsigned const band = index / band_steps;
    index -= band * band_steps;
    first = static_cast<int>(band) * band_tiles;
    count = count - first < band_tiles ? count - first : band_tiles;
  }
  unsigned const weight_tile = index / static_cast<unsigned>(count);
  int const token_tile = first + static_cast<int>(index - weight_tile * static_cast<unsigned>(count));
  int const token_begin = rows.begin + token_tile * tiles.width;
  int const token_end = rows.end - token_begin < tiles.width ? rows.end : token_begin + tiles.width;
  return {group, static_cast<int>(weight_tile), token_begin, token_end, tiles.width};
}

/// Steps of one group, saturated so that a warp's worth of groups can be summed in 32 bits whatever the
/// offsets hold. No output that fits a GPU's memory reaches the limit.
MOE_EXT_HOST_DEVICE constexpr unsigned count_group_steps(int token_tiles, int weight_tiles) {
  constexpr std::uint64_t kMost = 1u << 24;
  std::uint64_t const steps = static_cast<std::uint64_t>(token_tiles) * static_cast<unsigned>(weight_tiles);
  return static_cast<unsigned>(steps < kMost ? steps : kMost);
}

/// Most scheduler steps any offsets within the contract can give: the grid never needs more CTAs.
constexpr std::int64_t max_steps(Config const& config,
                                 std::int64_t num_rows,
                                 std::int64_t num_groups,
                                 std::int64_t n) {
  std::int64_t const groups = num_rows < num_groups ? num_rows : num_groups;
  return (num_rows / config.tile_tokens + groups) * count_weight_tiles(config, n);
}

/// Clusters that run at the same time.
constexpr std::int64_t resident_clusters(Config const& config, std::int64_t sm_count) {
  return sm_count * config.ctas_per_sm / config.split_k;
}

/// CTAs of a launch: all that run at the same time, or as many as there can be steps for.
constexpr std::int64_t grid_size(Config const& config,
                                 std::int64_t sm_count,
                                 std::int64_t num_rows,
                                 std::int64_t num_groups,
                                 std::int64_t n) {
  std::int64_t const resident = resident_clusters(config, sm_count);
  std::int64_t const steps = max_steps(config, num_rows, num_groups, n);
  return (resident < steps ? resident : steps) * config.split_k;
}

}  // namespace moe_ext::grouped_gemm
