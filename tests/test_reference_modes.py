"""The CPU's results do not depend on the default dtype, nor on autocast."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext import reference

BF16, FP32 = torch.bfloat16, torch.float32


def normal(*shape, dtype=BF16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=FP32).to(dtype)


def tensor(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def grouped_gemm():
    return moe_ext.grouped_gemm(
        normal(6, 64), normal(2, 16, 64), tensor([2, 6]), bias=normal(2, 16), out_dtype=FP32
    )


def grouped_gemm_fp8():
    a, scale_a = moe_ext.quantize_fp8(normal(6, 256), "1x128")
    b, scale_b = moe_ext.quantize_fp8(normal(2, 16, 256), "128x128")
    scales = {"scale_a": scale_a, "scale_b": scale_b}
    return moe_ext.grouped_gemm(a, b, tensor([2, 6]), **scales, out_dtype=FP32)


def grouped_gemm_without_scales():
    fp8 = torch.float8_e4m3fn
    a, b = normal(6, 64).to(fp8), normal(2, 16, 64).to(fp8)
    return moe_ext.grouped_gemm(a, b, tensor([2, 6]), out_dtype=FP32)


def grouped_gemm_masked():
    a, b = normal(2, 3, 64), normal(2, 16, 64)
    return moe_ext.grouped_gemm_masked(a, b, tensor([3, 3]), out_dtype=FP32)


def combine_tokens():
    weights = normal(3, 2, dtype=FP32)
    slot_row = tensor([0, 3, 1, -1, 2, 4])
    options = {"addend": normal(3, 64), "routed_scale": 2.5, "out_dtype": FP32}
    return moe_ext.combine_tokens(normal(5, 64), slot_row, weights, top_k=2, **options)


def quantize_fp8():
    q, scale = moe_ext.quantize_fp8(normal(3, 256), "1x128", power_of_two=True)
    return q.view(torch.uint8), scale


def topk_routing():
    bias = normal(8, dtype=FP32)
    return moe_ext.topk_routing(normal(5, 8), 2, correction_bias=bias, num_groups=2, scale=2.5)


def sort_tokens():
    return moe_ext.sort_tokens(tensor([[1, 0], [2, 1]]), 2)


def fused_moe(**options):
    routing = normal(5, 2, dtype=FP32), tensor([[0, 1], [1, 2], [3, 0], [2, 3], [-1, 1]])
    return moe_ext.fused_moe(
        normal(5, 64), normal(4, 64, 64), normal(4, 64, 32), *routing, **options
    )


def fused_moe_oai():
    return fused_moe(activation="swiglu_oai", w13_bias=normal(4, 64), addend=normal(5, 64))


def fused_moe_masked():
    return moe_ext.fused_moe_masked(
        normal(4, 3, 64), normal(4, 64, 64), normal(4, 64, 32), tensor([3, 3, 3, 3])
    )


def fused_moe_masked_fp8():
    (w13, scale13), (w2, scale2) = (
        moe_ext.quantize_fp8(normal(4, n, k), "tensor") for n, k in ((64, 64), (64, 32))
    )
    scales = {"w13_scale": scale13, "w2_scale": scale2}
    return moe_ext.fused_moe_masked(normal(4, 3, 64), w13, w2, tensor([3, 3, 3, 3]), **scales)


def fused_moe_reference():
    routing = normal(5, 2, dtype=FP32), tensor([[0, 1], [1, 2], [3, 0], [2, 3], [-1, 1]])
    operands = {"hidden_states": normal(5, 64), "w13": normal(4, 64, 64), "w2": normal(4, 64, 32)}
    operands |= dict(zip(("topk_weights", "topk_ids"), routing, strict=True))
    return reference.fused_moe_reference(**operands, out_dtype=FP32)


CALLS = (
    grouped_gemm,
    grouped_gemm_fp8,
    grouped_gemm_without_scales,
    grouped_gemm_masked,
    combine_tokens,
    quantize_fp8,
    topk_routing,
    sort_tokens,
    fused_moe,
    fused_moe_oai,
    fused_moe_masked,
    fused_moe_masked_fp8,
    fused_moe_reference,
)


def expect_equal(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def default_dtype(request):
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(FP32)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("default_dtype", [BF16, torch.float16, torch.float64], indirect=True)
def test_the_default_dtype_changes_nothing(call, default_dtype):
    got = call()
    torch.set_default_dtype(FP32)
    expect_equal(got, call())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autocast_changes_nothing(call, dtype):
    expected = call()
    with torch.autocast("cpu", dtype=dtype):
        got = call()
        assert torch.is_autocast_enabled("cpu")
    expect_equal(got, expected)


def test_autocast_under_inputs_that_require_grad_changes_nothing():
    a, b, offs = normal(6, 64), normal(2, 16, 64).requires_grad_(), tensor([2, 6])
    expected = moe_ext.grouped_gemm(a, b, offs, out_dtype=FP32)
    with torch.autocast("cpu", dtype=BF16):
        got = moe_ext.grouped_gemm(a, b, offs, out_dtype=FP32)
    assert got.requires_grad
    expect_equal(got, expected)


@pytest.mark.gpu
def test_autocast_on_cuda_changes_no_reference():
    a, b, offs = normal(6, 64).cuda(), normal(2, 16, 64).cuda(), tensor([2, 6]).cuda()
    expected = reference.grouped_gemm_reference(a, b, offs, out_dtype=FP32)
    with torch.autocast("cuda", dtype=BF16):
        got = reference.grouped_gemm_reference(a, b, offs, out_dtype=FP32)
    expect_equal(got, expected)
