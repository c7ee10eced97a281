"""`explain` says what the dispatcher would do, with the planner's tiles, and prints it."""

from __future__ import annotations

import dataclasses

import moe_ext
import pytest
import torch
from moe_ext import _dispatch

QWEN3_30B = {"num_groups": 128, "n": 1536, "k": 2048}


def test_explanation_agrees_with_dispatch_and_planner():
    explanation = moe_ext.explain(dtype=torch.float8_e4m3fn, num_rows=512, **QWEN3_30B)
    index = _dispatch.select(dtype="fp8", accumulate="promoted", num_rows=512, **QWEN3_30B)
    config = moe_ext.kernels()[index]
    assert (explanation.config, explanation.config_index) == (config.id, index)
    assert explanation.accumulate == "promoted"
    assert explanation.active_groups == 128
    assert explanation.largest_group == 4
    assert explanation.weight_bytes == 128 * 1536 * 2048
    assert explanation.floor_us == pytest.approx(2 + 128 * 1536 * 2048 / 4.5e6)
    assert explanation.predicted_us >= explanation.floor_us
    assert explanation.num_tiles >= 128 * 1536 / config.tile_weights
    assert explanation.padded_rows == 128 * explanation.token_widths[0] - 512


def test_offsets_decide_what_is_active_and_largest():
    offs = [0, 5, 5, 300, *[300] * 124]
    explanation = moe_ext.explain(dtype="bf16", num_rows=310, offs=offs, **QWEN3_30B)
    assert explanation.active_groups == 2
    assert explanation.largest_group == 295
    assert explanation.weight_bytes == 2 * 1536 * 2048 * 2


def test_no_rows():
    explanation = moe_ext.explain(dtype="bf16", num_rows=0, **QWEN3_30B)
    assert explanation.num_tiles == 0
    assert explanation.token_widths == ()
    assert "none" in str(explanation)


def test_it_is_frozen_and_prints_every_line():
    explanation = moe_ext.explain(dtype="bf16", num_rows=64, **QWEN3_30B)
    with pytest.raises(dataclasses.FrozenInstanceError):
        explanation.n = 1
    text = str(explanation)
    for part in (
        "problem",
        "kernel",
        "why",
        "work",
        "tiles",
        "weights",
        "time",
        explanation.config,
    ):
        assert part in text
    assert explanation.source in text
    assert all(len(line) < 120 for line in text.splitlines())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float16}, "`dtype` must be bfloat16"),
        ({"dtype": "int8"}, "`dtype` must be bfloat16"),
        ({"accumulate": "fast"}, '`accumulate` must be "promoted", or "fast" for fp8'),
        ({"num_rows": -1}, "`num_rows` must be a whole number from 0 to 2147482623, got -1"),
        ({"num_groups": 0}, "`num_groups` must be a whole number from 1 to 4096, got 0"),
        ({"offs": [1, 2]}, "`offs` must have 3 entries, got 2"),
        ({"offs": [3, 2, 6]}, "`offs` must not decrease"),
        ({"offs": [1, 2, 9]}, "`offs` must not decrease and end at num_rows = 6 at most"),
    ],
)
def test_errors(changes, message):
    valid = {"dtype": "bf16", "num_rows": 6, "num_groups": 3, "n": 64, "k": 64}
    with pytest.raises(ValueError, match="explain: " + message.replace("(", r"\(")):
        moe_ext.explain(**(valid | changes))


@pytest.mark.parametrize(
    "wrong",
    [{"num_rows": 2**31}, {"n": 2**40}, {"n": 512.0}, {"sm_count": 2**31}, {"num_groups": 5000}],
)
def test_numbers_out_of_range_are_named(wrong):
    problem = {"num_rows": 64, "num_groups": 8, "n": 256, "k": 256} | wrong
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be a whole number from"):
        moe_ext.explain(dtype="bf16", **problem)


@pytest.mark.parametrize(("n_segments", "orders"), [(1, {"Plain"}), (2, {"SwapAB"})])
def test_scales_per_block_have_kernels_of_their_own(n_segments, orders):
    explanation = moe_ext.explain(
        dtype="fp8",
        num_rows=65536,
        num_groups=128,
        n=352 * 4,
        k=2048,
        block_scales=True,
        n_segments=n_segments,
    )
    config = moe_ext.kernels()[explanation.config_index]
    assert (explanation.accumulate, config.accumulate) == ("block", "block")
    assert config.order in orders


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bf16", "block_scales": True}, "`block_scales` must be False"),
        ({"accumulate": "fast", "block_scales": True}, "`block_scales` must be False"),
        ({"n_segments": 3}, "`n_segments` must be 1, or 2 with `block_scales`, got 3"),
        ({"n_segments": 2}, "`n_segments` must be 1, or 2 with `block_scales`, got 2"),
        ({"scale_b_offset": (0, 8)}, "`scale_b_offset` must be .* 0 without, got"),
        ({"scale_b_offset": (128, 0), "block_scales": True}, "each 0 to 127 with"),
        ({"scale_b_offset": (1,), "block_scales": True}, "`scale_b_offset` must be"),
        ({"scale_b_offset": (0.5, 0), "block_scales": True}, "`scale_b_offset` must be"),
        ({"scale_b_offset": 5, "block_scales": True}, "`scale_b_offset` must be a sequence"),
        ({"n_segments": 2.0, "block_scales": True}, "`n_segments` must be 1, or 2"),
        ({"offs": 3}, "`offs` must be a sequence"),
        ({"dtype": [1]}, "`dtype` must be"),
        ({"n": 7}, "`n` must be a multiple of 8, or of 4 for float32 results, got 7"),
    ],
)
def test_what_the_op_would_refuse_is_not_explained(changes, message):
    arguments = {"dtype": "fp8", "num_rows": 4, "num_groups": 2, "n": 64, "k": 64} | changes
    with pytest.raises(ValueError, match=message):
        moe_ext.explain(**arguments)


def test_numbers_of_other_types_are_taken_if_they_are_whole():
    sizes = {"dtype": "bf16", "num_groups": 2, "n": 64, "k": 64}
    plain = moe_ext.explain(num_rows=16, offs=[7, 16], **sizes)
    offs = torch.tensor([7, 16], dtype=torch.int32)
    assert moe_ext.explain(num_rows=torch.tensor(16), offs=offs, **sizes) == plain
    for offs in ([7.5, 16], "ab", [7, "16"]):
        with pytest.raises(ValueError, match=r"`offs\[\d\]` must be a whole number"):
            moe_ext.explain(num_rows=16, offs=offs, **sizes)


@pytest.mark.parametrize(
    ("n_segments", "offset", "sums", "orders"),
    [
        (1, (0, 0), "block", {"Plain"}),
        (1, (64, 0), "block", {"SwapAB"}),
        (2, (64, 0), "block", {"SwapAB"}),
        (1, (0, 64), "shifted", {"SwapAB"}),
    ],
)
def test_blocks_off_the_grid_are_explained_with_the_kernel_that_takes_them(
    n_segments, offset, sums, orders
):
    told = moe_ext.explain(
        dtype="fp8",
        num_rows=4096,
        num_groups=8,
        n=4096,
        k=1856,
        block_scales=True,
        n_segments=n_segments,
        scale_b_offset=offset,
    )
    kernel = moe_ext.kernels()[told.config_index]
    assert kernel.accumulate == told.accumulate == sums
    assert kernel.order in orders
