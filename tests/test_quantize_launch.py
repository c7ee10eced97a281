"""The way of a good CUDA call of `quantize_fp8`, with a stand-in for the C++ op."""

from __future__ import annotations

import types

import pytest
import torch
from moe_ext import _quantize_run
from moe_ext.reference import quantize_fp8_reference
from support.quantize import GRANULARITIES, assert_bits, spread

NUMBERS = dict(enumerate(GRANULARITIES))


@pytest.fixture
def launches(monkeypatch):
    """Route the launch to the reference; collects what else the C++ op is given."""
    calls = []

    def configured(x, q, scale_out, partials, scale, num_valid_rows, number, power_of_two):
        if x.dtype is torch.float64:
            raise ValueError("quantize_fp8: `x` must have dtype BFloat16, Half or Float")
        partials = None if partials is None else tuple(partials.shape)
        calls.append((partials, scale, num_valid_rows, power_of_two))
        values, scales = quantize_fp8_reference(
            x, NUMBERS[number], scale=scale, power_of_two=power_of_two
        )
        q.copy_(values)
        scale_out.copy_(scales)

    kernels = types.SimpleNamespace(sm_count=132, quantize_fp8_configured=configured)
    monkeypatch.setattr(_quantize_run, "device_kernels", lambda index: kernels)
    return calls


def launch(x, granularity, *, outputs=None, scale=None, count=None, power_of_two=False):
    return _quantize_run._launch(outputs, x, granularity, scale, count, power_of_two)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(5, 200), (3, 5, 128)], ids=str)
def test_a_good_call_is_one_launch(launches, granularity, shape):
    x = spread(shape, torch.bfloat16, "cpu")
    count = torch.tensor([5] * len(shape[:-2]), dtype=torch.int32)
    q, scale = launch(x, granularity, count=count, power_of_two=True)
    expected_q, expected_scale = quantize_fp8_reference(x, granularity, power_of_two=True)
    assert_bits(q, expected_q)
    assert_bits(scale, expected_scale)
    ((partials, static, given, power_of_two),) = launches
    assert partials == ((x.shape[0] if x.dim() == 3 else 1, 1) if granularity == "tensor" else None)
    assert static is None
    assert given is count
    assert power_of_two


@pytest.mark.parametrize(
    ("shape", "partials"),
    [
        ((1, 1), (1, 1)),
        ((64, 8192), (1, 64)),
        ((8192, 8192), (1, 792)),
        ((100, 512, 1024), (100, 7)),
        ((1000, 2, 16), (1000, 1)),
    ],
)
def test_scratch_follows_the_size_up_to_a_wave(launches, shape, partials):
    launch(torch.zeros(1, 1, 1).bfloat16().expand(1, *shape)[0], "tensor")
    assert launches[0][0] == partials


def test_a_given_scale_needs_no_scratch(launches):
    scale = torch.tensor(0.5)
    _, returned = launch(torch.ones(3, 16), "tensor", scale=scale)
    assert launches == [(None, scale, None, False)]
    assert returned is not scale
    assert returned == scale


def test_outputs_are_filled(launches):
    outputs = torch.empty(3, 16).to(torch.float8_e4m3fn), torch.empty(3)
    assert launch(torch.ones(3, 16), "row", outputs=outputs) is outputs
    assert len(launches) == 1


def test_what_is_refused_or_empty_is_left_to_the_checks(launches):
    x = torch.ones(3, 16)
    assert launch(x, "block") is None
    assert launch(x[0], "row") is None
    assert launch(x[:0], "row") is None
    assert launch(x[:, :0], "row") is None
    assert launch(x, "row", scale=torch.ones(())) is None
    assert launch(x, "tensor", scale=torch.ones(()), power_of_two=True) is None
    with pytest.raises(ValueError, match="must have dtype"):
        launch(x.double(), "row")
    assert launches == []
