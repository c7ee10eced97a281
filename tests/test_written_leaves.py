"""Outputs that autograd lets nobody write are refused before they are written."""

from __future__ import annotations

import re

import moe_ext
import pytest
import torch

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def ones(*shape, dtype=BF16):
    return torch.ones(shape, dtype=dtype)


OFFS = torch.tensor([2, 5], dtype=torch.int32)
LAYER = (ones(2, 16), ones(4, 16, 16), ones(4, 16, 8), ones(2, 2), torch.tensor([[0, 3], [1, -1]]))
BUFFERS = (ones(2, 5, 16), ones(2, 16, 16), ones(2, 16, 8), OFFS)
CALLS = {
    "fused_moe_masked_out": (BUFFERS, {"out": (2, 5, 16, BF16)}),
    "fused_moe_out": (LAYER, {"out": (2, 16, BF16)}),
    "grouped_gemm_out": ((ones(5, 16), ones(2, 8, 16), OFFS), {"out": (5, 8, BF16)}),
    "grouped_gemm_masked_out": ((ones(2, 5, 16), ones(2, 8, 16), OFFS), {"out": (2, 5, 8, BF16)}),
    "topk_routing_out": ((ones(3, 8), 2), {"weights": (3, 2, FP32), "ids": (3, 2, torch.int32)}),
    "quantize_fp8_out": ((ones(3, 128), "row"), {"q": (3, 128, FP8), "scale_out": (3, FP32)}),
}
WRITTEN = [
    (op, name)
    for op, (_, outputs) in CALLS.items()
    for name, (*_, dtype) in outputs.items()
    if dtype.is_floating_point
]


def outputs_of(op):
    return {
        name: torch.zeros(shape, dtype=FP32).to(dtype)
        for name, (*shape, dtype) in CALLS[op][1].items()
    }


def run(op, outputs):
    getattr(moe_ext, op)(*CALLS[op][0], **outputs)


def expect_refused(op, name, outputs, got):
    versions = [tensor._version for tensor in outputs.values()]
    message = (
        f"{op}: `{name}` must be neither a leaf that requires grad nor a view of one where grad "
        f"mode is enabled, got {got}; call it under torch.no_grad()"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run(op, outputs)
    assert [tensor._version for tensor in outputs.values()] == versions
    assert not any(bool(tensor.detach().float().any()) for tensor in outputs.values())


@pytest.mark.parametrize(("op", "name"), WRITTEN)
def test_a_leaf(op, name):
    outputs = outputs_of(op)
    outputs[name].requires_grad_()
    expect_refused(op, name, outputs, "a leaf")
    with torch.no_grad():
        run(op, outputs)
    assert bool(outputs[name].detach().float().any())


@pytest.mark.parametrize(("op", "name"), WRITTEN)
def test_a_view_of_a_leaf(op, name):
    outputs = outputs_of(op)
    outputs[name] = outputs[name].requires_grad_().view(outputs[name].shape)
    expect_refused(op, name, outputs, "a view")


def test_a_result_that_requires_grad_is_written_again():
    out, (a, b, offs) = torch.zeros(5, 8, dtype=BF16), CALLS["grouped_gemm_out"][0]
    b = b.clone().requires_grad_()
    for _ in range(2):
        moe_ext.grouped_gemm_out(a, b, offs, out=out)
        assert out.requires_grad
    assert bool((out == 16).all())
    rows = torch.zeros(6, 8, dtype=BF16)
    for _ in range(2):  # a view of what is no leaf
        moe_ext.grouped_gemm_out(a, b, offs, out=rows[:5])
    assert rows.requires_grad
    assert bool((rows[:5] == 16).all())
