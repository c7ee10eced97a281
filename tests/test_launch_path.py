"""The way of a good CUDA call, with a stand-in for the C++ op: one launch, no second check."""

from __future__ import annotations

import sys
import types

import moe_ext
import pytest
import torch
from moe_ext.reference import grouped_gemm_reference

MODULE = sys.modules["moe_ext.grouped_gemm"]


@pytest.fixture
def launches(monkeypatch):
    """Route `_launch` to the reference; collects the arguments of every launch."""
    calls = []

    def configured(a, b, offs, scale_a, scale_b, out, offs_ready, index):
        if offs.dtype is not torch.int32:
            raise ValueError("grouped_gemm: `offs` must have dtype Int, got Long")
        calls.append((offs_ready, index))
        grouped_gemm_reference(a, b, offs, scale_a, scale_b, out=out)

    kernels = types.SimpleNamespace(sm_count=132, grouped_gemm_configured=configured)
    monkeypatch.setattr(MODULE, "device_kernels", lambda index: kernels)
    return calls


def problem(dtype=torch.bfloat16):
    a, b = torch.randn(5, 32).to(dtype), torch.randn(2, 16, 32).to(dtype)
    return a, b, torch.tensor([2, 5], dtype=torch.int32)


def launch(
    a, b, offs, *, out=None, scales=(None, None), out_dtype=None, accumulate="promoted", **options
):
    ready, config = options.get("offs_ready", False), options.get("config")
    return MODULE._launch(out, a, b, offs, *scales, out_dtype, accumulate, ready, config)


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float32])
def test_a_good_call_is_one_launch(launches, out_dtype):
    a, b, offs = problem()
    out = launch(a, b, offs, out_dtype=out_dtype, offs_ready=True)
    assert out.dtype is (out_dtype or torch.bfloat16)
    assert torch.equal(out, grouped_gemm_reference(a, b, offs, out_dtype=out.dtype))
    ((offs_ready, index),) = launches
    assert offs_ready
    assert moe_ext.kernels()[index].dtype == "bf16"


@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
def test_fp8_selects_by_accumulate(launches, accumulate):
    a, b, offs = problem(torch.float8_e4m3fn)
    launch(a, b, offs, scales=(torch.tensor(0.5), torch.ones(2)), accumulate=accumulate)
    assert moe_ext.kernels()[launches[0][1]].accumulate == accumulate


def test_a_named_kernel_runs(launches):
    config = next(config for config in moe_ext.kernels() if config.dtype == "bf16")
    launch(*problem(), config=config.id)
    assert launches == [(False, config.index)]


def test_out_is_filled(launches):
    a, b, offs = problem()
    out = torch.empty(5, 16)
    assert launch(a, b, offs, out=out) is out
    assert torch.equal(out, grouped_gemm_reference(a, b, offs, out_dtype=torch.float32))


def test_what_is_refused_or_empty_is_left_to_the_checks(launches):
    a, b, offs = problem()
    for wrong in (
        launch(a, b, offs.long()),
        launch(a, b[..., :16], offs),
        launch(a[0], b, offs),
        launch(a[:0], b, offs),
        launch(a, b[:, :0], offs),
        launch(a.float(), b.float(), offs),
        launch(a, b, offs, accumulate="fast"),
        launch(a, b, offs, out_dtype=torch.float16),
        launch(a, b, offs, config="nothing"),
        launch(a, b, offs, out=torch.empty(5, 16), out_dtype=torch.float32),
    ):
        assert wrong is None
    assert launches == []
