"""The way of a good CUDA call of `sort_tokens` and `combine_tokens`, with a stand-in for C++."""

from __future__ import annotations

import types

import pytest
import torch
from moe_ext import _combine_run, _sort_run
from moe_ext.reference import combine_tokens_reference, sort_tokens_reference
from support.tokens import assert_sorted, draw_ids


@pytest.fixture
def sorts(monkeypatch):
    """Route the sort to the reference; collects what else the C++ op is given."""
    calls = []

    def configured(topk_ids, offs, row_slot, slot_row, scratch, expert_map, first_expert):
        if topk_ids.dtype is torch.int16:
            raise ValueError("sort_tokens: `topk_ids` must have dtype Int or Long, got Short")
        calls.append((None if scratch is None else scratch.numel(), expert_map, first_expert))
        expected = sort_tokens_reference(
            topk_ids, offs.shape[0], first_expert=first_expert, expert_map=expert_map
        )
        for out, result in zip((offs, row_slot, slot_row), expected, strict=True):
            out.copy_(result)

    kernels = types.SimpleNamespace(
        sort_tokens_configured=configured,
        sort_tokens_scratch=lambda num_slots, num_experts: (num_slots > 20) * num_experts * 3,
    )
    monkeypatch.setattr(_sort_run, "device_kernels", lambda index: kernels)
    return calls


@pytest.mark.parametrize(("num_tokens", "scratch"), [(0, None), (5, None), (6, 21)])
def test_a_good_sort_is_one_call(sorts, num_tokens, scratch):
    ids = draw_ids(num_tokens, 4, 7, strange=0.2)
    assert_sorted(_sort_run._launch(ids, 7, 2, None), sort_tokens_reference(ids, 7, first_expert=2))
    assert sorts == [(scratch, None, 2)]


def test_a_map_is_handed_on(sorts):
    expert_map = torch.tensor([1, -1, 0], dtype=torch.int32)
    ids = draw_ids(3, 2, 3)
    expected = sort_tokens_reference(ids, 2, expert_map=expert_map)
    assert_sorted(_sort_run._launch(ids, 2, 0, expert_map), expected)
    assert sorts == [(None, expert_map, 0)]


def test_a_refused_sort_is_left_to_the_checks(sorts):
    ids = draw_ids(3, 2, 3)
    for num_experts in (0, -1, 4097, 2**40):
        assert _sort_run._launch(ids, num_experts, 0, None) is None
    assert _sort_run._launch(ids, 3, 1, torch.zeros(3, dtype=torch.int32)) is None
    with pytest.raises(ValueError, match="must have dtype"):
        _sort_run._launch(ids.to(torch.int16), 3, 0, None)
    assert sorts == []


@pytest.fixture
def combinations(monkeypatch):
    """Route the combination to the reference; counts the calls of the C++ op."""
    calls = []

    def configured(y, slot_row, topk_weights, addend, out, top_k, routed_scale):
        calls.append((top_k, routed_scale, out.dtype))
        options = {"top_k": top_k, "addend": addend, "routed_scale": routed_scale}
        out.copy_(
            combine_tokens_reference(y, slot_row, topk_weights, out_dtype=out.dtype, **options)
        )

    kernels = types.SimpleNamespace(combine_tokens_configured=configured)
    monkeypatch.setattr(_combine_run, "device_kernels", lambda index: kernels)
    return calls


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float32], ids=str)
def test_a_good_combination_is_one_call(combinations, out_dtype):
    y, weights, addend = torch.randn(6, 8).bfloat16(), torch.rand(3, 2), torch.randn(3, 8)
    slot_row = torch.tensor([5, 0, 1, -1, 3, 2], dtype=torch.int32)
    out = _combine_run._launch(y, slot_row, weights, 2, addend, 2.5, out_dtype)
    expected_dtype = out_dtype or torch.bfloat16
    options = {"top_k": 2, "addend": addend, "routed_scale": 2.5, "out_dtype": expected_dtype}
    assert torch.equal(out, combine_tokens_reference(y, slot_row, weights, **options))
    assert combinations == [(2, 2.5, expected_dtype)]


def test_a_refused_combination_is_left_to_the_checks(combinations):
    y, slot_row = torch.ones(6, 8).bfloat16(), torch.zeros(6, dtype=torch.int32)
    assert _combine_run._launch(y[0], slot_row, None, 2, None, 1.0, None) is None
    assert _combine_run._launch(y, slot_row.view(3, 2), None, 2, None, 1.0, None) is None
    assert _combine_run._launch(y, slot_row, None, 0, None, 1.0, None) is None
    assert _combine_run._launch(y, slot_row, None, 2, None, 1.0, torch.float16) is None
    assert _combine_run._launch(y, slot_row, None, 2, None, float("nan"), None) is None
    assert combinations == []
