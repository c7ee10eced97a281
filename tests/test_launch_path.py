"""The way of a good CUDA call, with a stand-in for the C++ op: one launch, no second check."""

from __future__ import annotations

import sys
import types

import moe_ext
import pytest
import torch
from moe_ext.reference import grouped_gemm_reference

MODULE = sys.modules["moe_ext._run"]


@pytest.fixture
def launches(monkeypatch):
    """Route `_launch` to the reference; collects the arguments of every launch."""
    calls = []

    def configured(
        a, b, offs, scale_a, scale_b, bias, out, offs_ready, n_segments, n_offset, k_offset, index
    ):
        if offs.dtype is not torch.int32:
            raise ValueError("grouped_gemm: `offs` must have dtype Int, got Long")
        calls.append((offs_ready, index))
        layout = {"n_segments": n_segments, "scale_b_offset": (n_offset, k_offset)}
        grouped_gemm_reference(a, b, offs, scale_a, scale_b, bias=bias, **layout, out=out)

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
    layout = options.get("n_segments", 1), options.get("n_offset", 0), options.get("k_offset", 0)
    masked, rows = options.get("masked", False), options.get("expected_rows")
    tensors = (masked, out, a, b, offs, *scales, options.get("bias"))
    try:
        return MODULE._launch(*tensors, *layout, out_dtype, accumulate, ready, config, rows)
    except ValueError:  # the other way to refuse
        return None


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


@pytest.mark.parametrize(
    ("n_segments", "n_offset", "orders"),
    [(1, 0, {"SwapAB", "Plain"}), (2, 0, {"SwapAB"}), (1, 64, {"SwapAB"})],
)
def test_scales_per_block_select_kernels_that_take_them(launches, n_segments, n_offset, orders):
    a, b, offs = problem(torch.float8_e4m3fn)
    scales = torch.ones(5, 1), torch.ones(2, n_segments, 1, 1)
    out = launch(a, b, offs, scales=scales, n_segments=n_segments, n_offset=n_offset)
    assert torch.equal(out, grouped_gemm_reference(a, b, offs))
    chosen = moe_ext.kernels()[launches[0][1]]
    assert chosen.accumulate == "block"
    assert chosen.order in orders
    assert launch(a, b, offs, scales=scales, accumulate="fast") is None


def test_blocks_that_begin_inside_k_have_kernels_of_their_own(launches):
    a, b, offs = problem(torch.float8_e4m3fn)
    scales = torch.ones(5, 1), torch.rand(2, 1, 2)
    out = launch(a, b, offs, scales=scales, k_offset=100)
    assert torch.equal(out, grouped_gemm_reference(a, b, offs, *scales, scale_b_offset=(0, 100)))
    assert moe_ext.kernels()[launches[0][1]].accumulate == "shifted"


def test_a_masked_call_is_one_launch(launches):
    a, b, counts = torch.randn(2, 3, 32), torch.randn(2, 16, 32), torch.tensor([3, 1])
    a, b, counts = a.bfloat16(), b.bfloat16(), counts.int()
    bias = torch.randn(2, 16)
    out = launch(a, b, counts, masked=True, bias=bias)
    expected = grouped_gemm_reference(a, b, counts, bias=bias)
    assert out.shape == (2, 3, 16)
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1, :1], expected[1, :1])
    launch(a, b, counts, masked=True, expected_rows=1)
    assert len(launches) == 2
    assert launch(a, b, counts, masked=True, expected_rows=-1) is None
    assert launch(a[0], b, counts, masked=True) is None
    assert launch(a, b, counts) is None


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
