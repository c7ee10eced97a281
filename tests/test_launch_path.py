"""What Python decides of a CUDA call, with stand-ins for the C++ ops: flags, choice, refusals."""

from __future__ import annotations

import sys
import types

import moe_ext
import pytest
import torch
from moe_ext.reference import grouped_gemm_reference

MODULE = sys.modules["moe_ext._run"]
MASKED, OFFS_READY, FP32_OUT, FAST, REMEMBER = 1, 2, 4, 8, 16
FP8 = torch.float8_e4m3fn


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = property(lambda self: True)


class Kernels(types.SimpleNamespace):
    """Stand-ins for the C++ ops: the reference, for problems that they were told a kernel for."""

    def __init__(self):
        super().__init__(sm_count=132, told={}, ran=[], refused=0)

    def grouped_gemm_launch(
        self, a, b, offs, scale_a=None, scale_b=None, bias=None, out=None, flags=0
    ):
        return self._run(a, b, offs, scale_a, scale_b, bias, out, flags, 1, 0, 0, -1, -1)

    def grouped_gemm_launch_with(self, *arguments):
        assert len(arguments) == 13
        return self._run(*arguments)

    def _run(self, a, b, offs, scale_a, scale_b, bias, out, flags, segments, n0, k0, rows, config):
        problem = (a.dtype, a.shape, b.shape, flags & FAST, segments, n0, k0, rows)
        index = self.told.get(problem) if config == -1 else config
        empty = 0 in (*a.shape[:-1], b.shape[1])
        if index is None or offs.dtype is not torch.int32 or empty:
            self.refused += 1
            raise ValueError("grouped_gemm: not the documented message")
        if flags & REMEMBER:
            self.told[problem] = config
        if out is None:
            dtype = torch.float32 if flags & FP32_OUT else torch.bfloat16
            out = torch.empty(*a.shape[:-1], b.shape[1], dtype=dtype)
        self.ran.append((flags, index))
        layout = {"n_segments": segments, "scale_b_offset": (n0, k0)}
        plain = a.as_subclass(torch.Tensor)
        grouped_gemm_reference(plain, b, offs, scale_a, scale_b, bias=bias, **layout, out=out)
        return out


@pytest.fixture
def kernels(monkeypatch):
    kernels = Kernels()
    monkeypatch.setattr(MODULE, "device_kernels", lambda index: kernels)
    return kernels


def problem(dtype=torch.bfloat16):
    a, b = torch.randn(5, 32).to(dtype), torch.randn(2, 16, 32).to(dtype)
    return a.as_subclass(OnCuda), b, torch.tensor([2, 5], dtype=torch.int32)


def masked_problem():
    a, b = torch.randn(2, 3, 32).bfloat16(), torch.randn(2, 16, 32).bfloat16()
    return a.as_subclass(OnCuda), b, torch.tensor([3, 3], dtype=torch.int32)


def twice(kernels, run, *args, **options):
    """Call twice; return the result and the flags and index of the first and second launch."""
    before, refused = len(kernels.ran), kernels.refused
    first, second = run(*args, **options), run(*args, **options)
    if first is not None:
        assert torch.equal(first, second)
    told, remembered = kernels.ran[before:]
    assert kernels.refused - refused <= 1
    return first, told, remembered


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float32])
def test_the_second_call_is_one_launch(kernels, out_dtype):
    args = problem()
    bias = torch.randn(2, 16)
    options = {"out_dtype": out_dtype, "offs_ready": True, "bias": bias}
    out, (flags, index), again = twice(kernels, MODULE.run_grouped_gemm, *args, **options)
    assert out.dtype is (out_dtype or torch.bfloat16)
    assert torch.equal(out, grouped_gemm_reference(*args, bias=bias, out_dtype=out.dtype))
    assert flags == OFFS_READY | REMEMBER
    assert again == (OFFS_READY | (FP32_OUT if out_dtype is torch.float32 else 0), index)
    assert moe_ext.kernels()[index].dtype == "bf16"


@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
def test_the_choice_is_by_accumulate(kernels, accumulate):
    args = problem(FP8)
    scales = {"scale_a": torch.tensor(0.5), "scale_b": torch.ones(2)}
    _, told, again = twice(kernels, MODULE.run_grouped_gemm, *args, **scales, accumulate=accumulate)
    assert moe_ext.kernels()[told[1]].accumulate == accumulate
    assert again == (FAST if accumulate == "fast" else 0, told[1])


@pytest.mark.parametrize(
    ("n_segments", "offset", "accumulate", "orders"),
    [
        (1, (0, 0), "block", {"SwapAB", "Plain"}),
        (2, (0, 0), "block", {"SwapAB"}),
        (1, (64, 0), "block", {"SwapAB"}),
        (1, (0, 100), "shifted", {"SwapAB"}),
    ],
)
def test_scales_per_block_choose_kernels_that_take_them(
    kernels, n_segments, offset, accumulate, orders
):
    args = problem(FP8)
    scale_b = torch.rand(2, n_segments, 1, 2 if offset[1] else 1)
    options = {
        "scale_a": torch.rand(5, 1),
        "scale_b": scale_b,
        "n_segments": n_segments,
        "scale_b_offset": offset,
    }
    out, told, again = twice(kernels, MODULE.run_grouped_gemm, *args, **options)
    assert torch.equal(out, grouped_gemm_reference(*args, **options))
    chosen = moe_ext.kernels()[told[1]]
    assert (chosen.accumulate, again) == (accumulate, (0, chosen.index))
    assert chosen.order in orders
    with pytest.raises(ValueError, match='`accumulate` must be "promoted" with scales per block'):
        MODULE.run_grouped_gemm(*args, **options, accumulate="fast")


def test_masked_calls(kernels, monkeypatch):
    asked = []
    select = MODULE.select
    monkeypatch.setattr(MODULE, "select", lambda *key: asked.append(key) or select(*key))
    args = masked_problem()
    out, (flags, _), again = twice(kernels, MODULE.run_grouped_gemm_masked, *args)
    expected = grouped_gemm_reference(*args)
    assert out.shape == (2, 3, 16)
    assert torch.equal(out, expected)
    assert (flags, again[0]) == (MASKED | REMEMBER, MASKED)
    for expected_rows in (0, 2, 50):
        twice(kernels, MODULE.run_grouped_gemm_masked, *args, expected_rows=expected_rows)
    assert [key[2] for key in asked] == [6, 2, 4, 6]
    with pytest.raises(ValueError, match="`expected_rows` must not be negative, got -1"):
        MODULE.run_grouped_gemm_masked(*args, expected_rows=-1)


def test_a_named_kernel_runs_and_is_not_remembered(kernels):
    config = next(config for config in moe_ext.kernels() if config.dtype == "bf16")
    _, first, second = twice(kernels, MODULE.run_grouped_gemm, *problem(), config=config.id)
    assert first == second == (0, config.index)
    assert kernels.refused == 0
    assert kernels.told == {}


@pytest.mark.parametrize("masked", [False, True])
def test_out_is_filled(kernels, masked):
    args = masked_problem() if masked else problem()
    run = MODULE.run_grouped_gemm_masked_out if masked else MODULE.run_grouped_gemm_out
    out = torch.zeros(*args[0].shape[:-1], 16)
    none, _, again = twice(kernels, run, *args, out=out)
    assert none is None
    assert again[0] == (MASKED if masked else 0)
    assert torch.equal(out[:1], grouped_gemm_reference(*args, out_dtype=torch.float32)[:1])
    run(*args, out=out, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="`out` must be a tensor, got None"):
        run(*args, out=None)


def test_what_has_no_elements_is_not_launched(kernels):
    a, b, offs = problem()
    assert MODULE.run_grouped_gemm(a[:0], b, torch.zeros_like(offs)).shape == (0, 16)
    assert MODULE.run_grouped_gemm(a, b[:, :0], offs).shape == (5, 0)
    a, b, counts = masked_problem()
    assert MODULE.run_grouped_gemm_masked(a[:, :0], b, counts).shape == (2, 0, 16)
    assert kernels.ran == []


def test_what_is_refused_has_the_documented_message(kernels):
    a, b, offs = problem()
    run = MODULE.run_grouped_gemm
    for message, args, options in (
        ("`offs` must be int32", (a, b, offs.long()), {}),
        ("`b` must have shape", (a, b[..., :16], offs), {}),
        ("`a` must have shape", (a[0], b, offs), {}),
        ("`b` must be a tensor, got None", (a, None, offs), {}),
        ("`accumulate` must be", (a, b, offs), {"accumulate": "fast"}),
        ("`accumulate` must be", (a, b, offs), {"accumulate": "slow"}),
        ("`out_dtype` must be", (a, b, offs), {"out_dtype": torch.float16}),
        ("`config` must be one of", (a, b, offs), {"config": "nothing"}),
        ("`scale_b_offset` must be", (a, b, offs), {"scale_b_offset": (0, 0, 0)}),
    ):
        with pytest.raises(ValueError, match=f"^grouped_gemm: {message}"):
            run(*args, **options)
    out = torch.empty(5, 16)
    with pytest.raises(ValueError, match="`out_dtype` must be None or float32 to match `out`"):
        MODULE.run_grouped_gemm_out(a, b, offs, out=out, out_dtype=torch.bfloat16)
    assert kernels.told == {}


def test_flags_are_those_of_the_c_plus_plus_op():
    names = ("_MASKED", "_OFFS_READY", "_FP32_OUT", "_FAST", "_REMEMBER")
    assert [getattr(MODULE, name) for name in names] == [
        MASKED,
        OFFS_READY,
        FP32_OUT,
        FAST,
        REMEMBER,
    ]
