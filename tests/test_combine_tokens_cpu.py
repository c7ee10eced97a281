"""What `combine_tokens` promises, on the CPU, bit for bit against a plain loop."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from support.tokens import combine_by_loop, draw_ids

NAN = float("nan")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
dtypes = pytest.mark.parametrize("out_dtype", DTYPES)


def problem(num_tokens, top_k, hidden=64, num_experts=8, strange=0.2):
    """Rows sorted by expert, NaN in those that nobody has."""
    ids = draw_ids(num_tokens, top_k, num_experts, strange=strange)
    offs, _, slot_row = moe_ext.sort_tokens(ids, num_experts)
    y = torch.randn(ids.numel(), hidden).bfloat16()
    y[int(offs[-1]) :] = NAN
    return y, slot_row, torch.rand(num_tokens, top_k)


def check(y, slot_row, weights, top_k, addend=None, routed_scale=1.0, out_dtype=torch.bfloat16):
    out = moe_ext.combine_tokens(
        y,
        slot_row,
        weights,
        top_k=top_k,
        addend=addend,
        routed_scale=routed_scale,
        out_dtype=out_dtype,
    )
    expected = combine_by_loop(y, slot_row, weights, top_k, addend, routed_scale, out_dtype)
    assert out.dtype is out_dtype
    assert out.is_contiguous()
    assert torch.equal(out, expected)  # NaN is equal to nothing
    return out


@dtypes
@pytest.mark.parametrize("top_k", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_equals_a_plain_loop(num_tokens, top_k, out_dtype):
    y, slot_row, weights = problem(num_tokens, top_k)
    addend = torch.randn(num_tokens, 64)
    for given in (weights, weights.bfloat16(), None):
        check(y, slot_row, given, top_k, out_dtype=DTYPES[out_dtype])
        check(y, slot_row, given, top_k, addend, 2.5, DTYPES[out_dtype])
        check(y, slot_row, given, top_k, addend.bfloat16(), 0.1, DTYPES[out_dtype])


def test_a_small_example_by_hand():
    y = torch.tensor([1.0, 2.0, 4.0, NAN])[:, None].expand(4, 8).bfloat16().contiguous()
    slot_row = torch.tensor([2, 0, -1, 1], dtype=torch.int32)
    weights = torch.tensor([[0.5, 3.0], [NAN, 0.25]])
    addend = torch.full((2, 8), 10.0)
    out = moe_ext.combine_tokens(y, slot_row, weights, top_k=2, addend=addend, routed_scale=2.0)
    assert out.dtype is torch.bfloat16
    assert out[:, 0].tolist() == [20.0, 11.0]


def test_the_order_is_that_of_the_choices():
    y = torch.tensor([2.0**30, 1.0, -(2.0**30)])[:, None].expand(3, 8).bfloat16().contiguous()
    for rows, expected in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
        slot_row = torch.tensor(rows, dtype=torch.int32)
        out = moe_ext.combine_tokens(y, slot_row, None, top_k=3, out_dtype=torch.float32)
        assert out.tolist() == [[expected] * 8]


def test_it_rounds_once():
    y = torch.tensor([1.0, 2.0**-8, 2.0**-8])[:, None].expand(3, 8).bfloat16().contiguous()
    slot_row = torch.tensor([0, 1, 2], dtype=torch.int32)
    out = moe_ext.combine_tokens(y, slot_row, None, top_k=3)
    assert out.float().tolist() == [[1.0 + 2.0**-7] * 8]  # step by step in bfloat16 it stays 1


@pytest.mark.parametrize("row", [-1, -(2**31), 3, 2**31 - 1])
def test_slots_without_a_row_contribute_nothing(row):
    y = torch.ones(3, 8).bfloat16()
    slot_row = torch.tensor([1, row, row, row], dtype=torch.int32)
    weights = torch.tensor([[2.0, NAN], [NAN, NAN]])
    out = moe_ext.combine_tokens(y, slot_row, weights, top_k=2)
    assert out.tolist() == [[2.0] * 8, [0.0] * 8]


def test_nan_of_a_row_that_counts_stays():
    y = torch.ones(2, 8).bfloat16()
    y[1, 3] = NAN
    out = moe_ext.combine_tokens(y, torch.tensor([0, 1], dtype=torch.int32), None, top_k=2)
    assert out.isnan().tolist() == [[column == 3 for column in range(8)]]


def test_strided_inputs():
    y, slot_row, _ = problem(6, 4)
    wide = torch.full((y.shape[0], 96), NAN, dtype=torch.bfloat16)
    wide[:, 16:80] = y
    weights = torch.rand(4, 12).T[::2]
    addend = torch.randn(12, 72)[::2, 8:]
    check(wide[:, 16:80], slot_row, weights, 4, addend, 1.5)
    check(y[:1].expand(24, 64), slot_row, weights, 4, addend[:1].expand(6, 64))


def test_no_rows_and_no_columns():
    slot_row = torch.tensor([0, 0], dtype=torch.int32)
    none = moe_ext.combine_tokens(torch.empty(0, 8).bfloat16(), slot_row, None, top_k=2)
    assert none.tolist() == [[0.0] * 8]
    assert moe_ext.combine_tokens(torch.empty(3, 0).bfloat16(), slot_row, None, top_k=1).shape == (
        2,
        0,
    )
