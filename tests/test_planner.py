"""The tile scheduler, on its host twin: each element once, nothing outside a group."""

from __future__ import annotations

import moe_ext
import pytest
from moe_ext._configs import planner

pytest.importorskip("hypothesis")
np = pytest.importorskip("numpy")
from hypothesis import given, settings, strategies  # noqa: E402

IDS = [config.id for config in moe_ext.kernels()]


def clamped_groups(offs, num_rows):
    """Rows of each group as the contract clamps them: only in range when offsets keep to it."""
    begin, groups = 0, []
    for end in offs:
        first, last = (min(max(row, 0), num_rows) for row in (begin, end))
        groups.append((first, max(first, last)))
        begin = end
    return groups


def check_tiles(offs, num_rows, n, config):
    """Cover every (group, row, column) once, by tiles that stay within their group."""
    groups = clamped_groups(offs, num_rows)
    covered = [np.zeros((end - begin, n), dtype=np.int32) for begin, end in groups]
    tiles = planner().tiles(offs, num_rows, n, config.index)
    for group, weight_begin, token_begin, token_width, token_end in tiles:
        begin, end = groups[group]
        assert begin <= token_begin < token_end <= end
        assert token_end - token_begin <= token_width <= config.tile_tokens
        assert token_width % 8 == 0
        assert weight_begin % config.tile_weights == 0
        columns = slice(weight_begin, weight_begin + config.tile_weights)
        covered[group][token_begin - begin : token_end - begin, columns] += 1
    assert all((part == 1).all() for part in covered)
    return tiles


@pytest.mark.parametrize("config_id", IDS)
@settings(deadline=None, max_examples=60)
@given(
    rows=strategies.lists(
        strategies.one_of(
            strategies.integers(0, 20),
            strategies.sampled_from([63, 64, 65, 127, 128, 129, 257, 600]),
        ),
        min_size=1,
        max_size=10,
    ),
    tail=strategies.integers(0, 3),
    n=strategies.integers(1, 80).map(lambda eighths: 8 * eighths),
)
def test_tiles_cover_the_result_exactly_once(config_id, rows, tail, n):
    config = moe_ext.kernels()[IDS.index(config_id)]
    offs = np.cumsum(rows).tolist()
    num_rows = offs[-1] + tail
    tiles = check_tiles(offs, num_rows, n, config)
    plan = planner().plan(offs, num_rows, n, config.index, 132)
    assert plan["num_tiles"] == len(tiles)
    assert plan["grid"] <= 132 * config.ctas_per_sm
    cluster = config.split_k
    assert plan["grid"] >= min(len(tiles), 132 // cluster * cluster)
    assert len(plan["token_widths"]) == len(plan["token_tiles"]) == len(rows)
    # What the host makes descriptors for (csrc/grouped_gemm/launch.cuh).
    if 0 < num_rows <= config.tile_tokens:
        (widest,) = planner().plan([num_rows], num_rows, n, config.index, 132)["token_widths"]
        assert max(plan["token_widths"]) <= widest
    padded = 0
    for count, width, tile_count in zip(
        rows, plan["token_widths"], plan["token_tiles"], strict=True
    ):
        assert (width == 0) == (count == 0) == (tile_count == 0)
        assert tile_count * width >= count
        assert (tile_count - 1) * width < max(count, 1)
        padded += tile_count * width - count
    assert plan["padded_rows"] == padded


@pytest.mark.parametrize("config_id", IDS)
@settings(deadline=None, max_examples=60)
@given(
    offs=strategies.lists(
        strategies.one_of(
            strategies.integers(-5, 400),
            strategies.sampled_from([-(2**31), 2**31 - 1, 2**31 - 2, -1]),
        ),
        min_size=1,
        max_size=8,
    ),
    num_rows=strategies.integers(0, 300),
)
def test_offsets_outside_the_contract_stay_inside_the_tensor(config_id, offs, num_rows):
    config = moe_ext.kernels()[IDS.index(config_id)]
    check_tiles(offs, num_rows, 136, config)


def test_unknown_index_is_refused():
    with pytest.raises(IndexError, match="config must be in"):
        planner().plan([1], 1, 8, len(IDS), 132)
