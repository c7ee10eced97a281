// Which tile a CTA computes next: one warp walks the groups' offsets, nothing is stored.
#pragma once

#include <cstdint>

#include "grouped_gemm/params.hpp"
#include "grouped_gemm/sm90/traits.cuh"

namespace moe_ext::grouped_gemm {

/// Hands out tiles `first_step`, `first_step + stride`, ... of the whole problem in group order. All 32 lanes
/// of one warp call every method together. Each lane holds a few neighbouring groups of the current chunk, so
/// that up to kGroupsPerLane * 32 offsets cost one memory latency. Where rows are listed a tile is found by a division,
/// in few instructions, for which the first load of a launch waits (docs/notes/first-microseconds.md).
template <class ConfigTag>
class TileScheduler {
 public:
  __device__ TileScheduler(GroupRows const& groups, int weight_tiles, unsigned first_step, unsigned stride)
      : groups_(groups),
        weight_tiles_(static_cast<unsigned>(weight_tiles)),
        step_(first_step),
        stride_(stride),
        lane_(threadIdx.x % 32) {
    if constexpr (kTakesList) {
      if (groups_.listed != nullptr) {
        weights_read_once_ = true;  // but where a token has an expert twice
        begin_list();
        return;
      }
    }
    load_chunk();
  }

  /// Whether no group near the last tile's has a second token tile, which would read the same weights again.
  __device__ bool weights_read_once() const {
    return weights_read_once_;
  }

  /// The next tile of this CTA; `group` is -1 when there is none.
  __device__ Tile next() {
    if constexpr (kTakesList) {
      if (groups_.listed != nullptr) {
        return next_listed();
      }
    }
    while (step_ >= chunk_steps_) {
      step_ -= chunk_steps_;
      first_group_ += kGroupsPerLane * 32;
      if (first_group_ >= groups_.num_groups) {
        return {.group = -1};
      }
      load_chunk();
    }
    int const owner = __ffs(static_cast<int>(__ballot_sync(kFullWarp, step_ < lane_end_))) - 1;
    // Every lane looks among its own groups; only the owner's answer counts.
    unsigned index = step_ - lane_begin_;
    int which = 0;
    int before = begin_;
    int end = ends_[0];
#pragma unroll
    for (int i = 1; i < kGroupsPerLane; ++i) {
      if (which == i - 1 && index >= steps_[i - 1]) {
        index -= steps_[i - 1];
        which = i;
        before = ends_[i - 1];
        end = ends_[i];
      }
    }
    // From here on all lanes compute the same, so that a branch costs one path.
    int const group = first_group_ + owner * kGroupsPerLane + __shfl_sync(kFullWarp, which, owner);
    index = __shfl_sync(kFullWarp, index, owner);
    RowRange const rows =
        rows_of(groups_, group, __shfl_sync(kFullWarp, before, owner), __shfl_sync(kFullWarp, end, owner));
    step_ += stride_;
    return tile_in_group(
        group, rows, split_tokens<ConfigTag>(rows.end - rows.begin), static_cast<int>(weight_tiles_), index);
  }

 private:
  static constexpr int kGroupsPerLane = 4;
  static constexpr bool kTakesList = takes_list(ConfigTag::value);
  static_assert(!kTakesList || ConfigTag::value.tile_tokens >= kListedRows);

  /// Where this launch's groups are not the first, those in front are counted.
  __device__ void begin_list() {
    if (groups_.first_listed > 0) {
      for (int i = 0; i < groups_.num_rows; i += 32) {
        int const group = i + lane_ < groups_.num_rows ? groups_.listed[i + lane_].group : -1;
        first_entry_ += __popc(__ballot_sync(kFullWarp, group >= 0 && group < groups_.first_listed));
      }
    }
    load_listed();
  }

  /// The piece that the next tile is of, on its way while this one's is loaded.
  __device__ void load_listed() {
    int const entry = static_cast<int>(step_ / weight_tiles_) + first_entry_;
    listed_ = entry < groups_.num_rows ? groups_.listed[entry] : ListedRows{-1, 0, 0};
  }

  __device__ Tile next_listed() {
    ListedRows const rows = listed_;
    int const group = rows.group - groups_.first_listed;
    if (rows.group < 0 || group >= groups_.num_groups) {
      return {.group = -1};
    }
    auto const weight_tile = static_cast<int>(step_ % weight_tiles_);
    step_ += stride_;
    load_listed();
    return {group, weight_tile, rows.begin, rows.end, smallest_width<ConfigTag>(rows.end - rows.begin)};
  }

  __device__ void load_chunk() {
    int const group = first_group_ + lane_ * kGroupsPerLane;
#pragma unroll
    for (int i = 0; i < kGroupsPerLane; ++i) {
      // Past the last group: an empty one.
      ends_[i] = group + i < groups_.num_groups ? groups_.offs[group + i] : -1;
    }
    int const before = lane_ == 0 ? end_before(groups_, first_group_) : 0;
    int const neighbour = __shfl_up_sync(kFullWarp, ends_[kGroupsPerLane - 1], 1);
    begin_ = lane_ == 0 ? before : neighbour;

    unsigned lane_steps = 0;
    bool again = false;
#pragma unroll
    for (int i = 0; i < kGroupsPerLane; ++i) {
      RowRange const rows = rows_of(groups_, group + i, i == 0 ? begin_ : ends_[i - 1], ends_[i]);
      int const token_tiles = split_tokens<ConfigTag>(rows.end - rows.begin).count;
      again = again || token_tiles > 1;
      steps_[i] = count_group_steps(token_tiles, static_cast<int>(weight_tiles_));
      lane_steps += steps_[i];
    }
    weights_read_once_ = !__any_sync(kFullWarp, again);
    lane_end_ = lane_steps;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      unsigned const below = __shfl_up_sync(kFullWarp, lane_end_, distance);
      lane_end_ += lane_ >= distance ? below : 0;
    }
    lane_begin_ = lane_end_ - lane_steps;
    chunk_steps_ = __shfl_sync(kFullWarp, lane_end_, 31);
  }

  GroupRows const& groups_;
  unsigned weight_tiles_;
  unsigned step_;  // relative to the current chunk of groups
  unsigned stride_;
  int lane_;
  bool weights_read_once_;
  ListedRows listed_;    // where rows are listed: of the next tile
  int first_entry_ = 0;  // likewise: of this launch's groups
  int first_group_ = 0;
  unsigned chunk_steps_ = 0;
  unsigned lane_begin_ = 0;  // steps of the chunk before this lane's groups
  unsigned lane_end_ = 0;    // and up to and including them
  int begin_ = 0;            // raw offset (masked: count) before this lane's first group
  int ends_[kGroupsPerLane];
  unsigned steps_[kGroupsPerLane];
};

}  // namespace moe_ext::grouped_gemm
