"""What `sort_tokens` promises, on the CPU, against a plain loop."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from support.tokens import INT64_MAX, INT64_MIN, draw_ids, sort_by_loop, strange_ids

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies  # noqa: E402

DTYPES = (torch.int32, torch.int64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check(ids, num_experts, first_expert=0, expert_map=None):
    given_map = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    results = moe_ext.sort_tokens(ids, num_experts, first_expert=first_expert, expert_map=given_map)
    expected = sort_by_loop(ids.tolist(), num_experts, first_expert, expert_map)
    assert all(result.dtype is torch.int32 and result.is_contiguous() for result in results)
    assert tuple(result.tolist() for result in results) == expected
    return results


@dtypes
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"),
    [(0, 8, 4), (1, 1, 1), (1, 8, 128), (7, 2, 3), (33, 4, 60), (20, 32, 257), (2, 3, 4096)],
)
def test_equals_a_plain_loop(dtype, num_tokens, top_k, num_experts):
    for strange in (0.0, 0.3, 1.0):
        check(draw_ids(num_tokens, top_k, num_experts, dtype, strange=strange), num_experts)


def test_a_small_example_by_hand():
    ids = torch.tensor([[2, 0], [0, -1], [5, 2]])
    offs, row_slot, slot_row = moe_ext.sort_tokens(ids, 3)
    assert offs.tolist() == [2, 2, 4]
    assert row_slot.tolist() == [1, 2, 0, 5, -1, -1]
    assert slot_row.tolist() == [2, 0, 1, -1, -1, 3]


@dtypes
def test_ids_of_no_expert_are_dropped(dtype):
    ids = torch.tensor([strange_ids(4, dtype)], dtype=dtype)
    offs, row_slot, slot_row = moe_ext.sort_tokens(ids, 4)
    assert offs.tolist() == [0] * 4
    assert row_slot.tolist() == slot_row.tolist() == [-1] * ids.numel()


def test_first_expert():
    ids = torch.tensor([[7, 8, 9, 6, 10, 0, -1, INT64_MIN, INT64_MAX]])
    offs, _, _ = check(ids, 3, first_expert=7)
    assert offs.tolist() == [1, 2, 3]
    last = torch.tensor([[2**31 - 1, 2**31, INT64_MIN, INT64_MAX]])
    offs, _, slot_row = check(last, 3, first_expert=2**31 - 1)
    assert offs.tolist() == [1, 2, 2]
    assert slot_row.tolist() == [0, 1, -1, -1]


@dtypes
def test_expert_map(dtype):
    expert_map = [-1, 2, 0, 3, 1, -7, 2**31 - 1, -(2**31), 2]
    ids = torch.tensor([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [-1, 4, 1, 8, 2]], dtype=dtype)
    offs, _, _ = check(ids, 3, expert_map=expert_map)
    assert offs.tolist() == [2, 4, 8]
    check(torch.tensor([strange_ids(9, dtype)], dtype=dtype), 3, expert_map=expert_map)
    check(ids, 3, expert_map=[])


def test_an_id_twice_in_a_token_is_two_rows():
    _, row_slot, _ = check(torch.tensor([[1, 1], [1, 0]]), 2)
    assert row_slot.tolist() == [3, 0, 1, 2]


@dtypes
def test_strided_ids(dtype):
    base = draw_ids(40, 24, 16, dtype)
    for ids in (base[:, 3:11], base[::3, :5], base[5:6].expand(9, 24), base[:, 7:8]):
        check(ids, 16)


@hypothesis.given(strategies.data())
@hypothesis.settings(deadline=None, max_examples=150)
def test_the_outputs_belong_together(data):
    num_experts = data.draw(strategies.integers(1, 12))
    top_k = data.draw(strategies.integers(1, 5))
    some = strategies.integers(-2, num_experts + 2) | strategies.integers(INT64_MIN, INT64_MAX)
    tokens = data.draw(
        strategies.lists(strategies.lists(some, min_size=top_k, max_size=top_k), max_size=20)
    )
    first_expert = data.draw(strategies.integers(0, 3))
    ids = torch.tensor(tokens, dtype=torch.int64).reshape(-1, top_k)
    offs, row_slot, slot_row = check(ids, num_experts, first_expert)
    num_rows = int(offs[-1])
    slots = row_slot[:num_rows].long()
    assert slot_row[slots].tolist() == list(range(num_rows))
    assert bool((row_slot[num_rows:] == -1).all())
    assert int((slot_row >= 0).sum()) == num_rows
    begin = 0
    for expert, end in enumerate(offs.tolist()):
        own = slots[begin:end]
        assert bool((ids.flatten()[own] == first_expert + expert).all())
        assert bool((own.diff() > 0).all())
        begin = end


def test_the_way_through_a_layer():
    """Sort, gather, multiply, combine: as an ordinary matrix product for each token's experts."""
    hidden, weights = torch.randn(20, 64).bfloat16(), torch.randn(6, 32, 64).bfloat16()
    ids = torch.rand(20, 8).argsort(dim=1)[:, :3] - 1  # -1 to 6: the first and last are elsewhere
    factors = torch.rand(20, 3)
    offs, row_slot, slot_row = moe_ext.sort_tokens(ids, 6)
    rows = hidden[row_slot.clamp_min(0) // 3]
    y = moe_ext.grouped_gemm(rows, weights, offs)
    out = moe_ext.combine_tokens(y, slot_row, factors, top_k=3, out_dtype=torch.float32)
    expected = torch.zeros(20, 32)
    for token in range(20):
        for choice in range(3):
            expert = int(ids[token, choice])
            if 0 <= expert < 6:
                product = (weights[expert].float() @ hidden[token].float()).bfloat16()
                expected[token] += factors[token, choice] * product.float()
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=5e-2)
