"""The way of a good CUDA call of `topk_routing`, with a stand-in for the C++ op."""

from __future__ import annotations

import types

import pytest
import torch
from moe_ext import _routing_run
from moe_ext.reference import topk_routing_reference
from support.routing import SCORINGS, normal_logits, some_bias


@pytest.fixture
def launches(monkeypatch):
    """Route the launch to the reference; counts the calls."""
    calls = []

    def configured(logits, bias, weights, ids, scoring, renormalize, groups, kept, scale):
        if logits.dtype is torch.float64:
            raise ValueError("topk_routing: `logits` must have dtype BFloat16, Half or Float")
        calls.append(scoring)
        values, experts = topk_routing_reference(
            logits,
            weights.shape[1],
            scoring=SCORINGS[scoring],
            correction_bias=bias,
            renormalize=renormalize,
            num_groups=groups,
            topk_groups=kept,
            scale=scale,
        )
        weights.copy_(values)
        ids.copy_(experts)

    kernels = types.SimpleNamespace(topk_routing_configured=configured)
    monkeypatch.setattr(_routing_run, "device_kernels", lambda index: kernels)
    return calls


def launch(logits, top_k, *, outputs=None, scoring="softmax", bias=None, groups=(1, 1)):
    return _routing_run._launch(outputs, logits, top_k, scoring, bias, False, *groups, 1.5)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_good_call_is_one_launch(launches, scoring):
    logits, bias = normal_logits(5, 16), some_bias(16)
    weights, ids = launch(logits, 4, scoring=scoring, bias=bias, groups=(4, 2))
    expected = topk_routing_reference(
        logits,
        4,
        scoring=scoring,
        correction_bias=bias,
        renormalize=False,
        num_groups=4,
        topk_groups=2,
        scale=1.5,
    )
    assert torch.equal(weights, expected[0])
    assert torch.equal(ids, expected[1])
    assert launches == [SCORINGS.index(scoring)]


def test_outputs_are_filled(launches):
    outputs = torch.empty(3, 4), torch.empty(3, 4, dtype=torch.int32)
    assert launch(torch.ones(3, 16), 4, outputs=outputs) is outputs
    assert len(launches) == 1


def test_what_is_refused_is_left_to_the_checks(launches):
    logits = torch.ones(3, 16)
    assert launch(logits, 4, scoring="softplus") is None
    assert launch(logits[0], 4) is None
    assert launch(logits, 0) is None
    assert launch(logits, 33) is None
    assert launch(logits, 4, bias=torch.ones(16).half()) is None
    assert launch(logits, 4, outputs=(torch.empty(3, 5), torch.empty(3, 5))) is None
    assert launch(logits, 4, outputs=(torch.empty(()), torch.empty(3, 5))) is None
    with pytest.raises(ValueError, match="must have dtype"):
        launch(logits.double(), 4)
    assert launches == []
