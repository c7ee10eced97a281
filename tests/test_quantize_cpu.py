"""What `quantize_fp8` promises, on the CPU: bounds, scales, special values, counts."""

from __future__ import annotations

import math

import moe_ext
import pytest
import torch
from moe_ext.reference import quantize_fp8_reference
from support.quantize import (
    DTYPES,
    GRANULARITIES,
    assert_bits,
    check,
    expand_scale,
    poison_rows,
    scale_shape,
    spread,
)

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies  # noqa: E402

FP8 = torch.float8_e4m3fn
TINY = torch.finfo(torch.float32).tiny
FLOAT_MAX = torch.finfo(torch.float32).max
SHAPES = [(1, 1), (3, 128), (5, 129), (129, 360), (2, 130, 200), (0, 128), (4, 0), (0, 3, 64)]

granularities = pytest.mark.parametrize("granularity", GRANULARITIES)


def plain_loop(x, granularity):
    """Values and scales one block after the other, scales in float64 and rounded once."""
    rows, k = x.shape
    height, width = {
        "tensor": (rows, k),
        "row": (1, k),
        "1x128": (1, 128),
        "128x128": (128, 128),
    }[granularity]
    q, scale = torch.empty(rows, k), torch.empty(-(-rows // height), -(-k // width))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (
                slice(i * height, (i + 1) * height),
                slice(j * width, (j + 1) * width),
            )
            largest = x[block].double().abs().max()
            scale[i, j] = (largest / 448).float() if largest > 0 else 1.0
            q[block] = (x[block].double() / scale[i, j].double()).float()
    shape = scale_shape(granularity, (rows, k))
    return q.to(FP8), scale.reshape(shape)


@granularities
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_equal_a_plain_loop(granularity, dtype):
    x = spread((130, 300), DTYPES[dtype], "cpu")
    q, scale = moe_ext.quantize_fp8(x, granularity)
    expected_q, expected_scale = plain_loop(x, granularity)
    assert_bits(scale, expected_scale)
    assert_bits(q, expected_q)


@granularities
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_shapes_and_strides(granularity, shape, power_of_two):
    x = spread(shape, torch.bfloat16, "cpu")
    q, scale = moe_ext.quantize_fp8(x, granularity, power_of_two=power_of_two)
    assert q.shape == shape
    assert scale.shape == scale_shape(granularity, shape)
    assert scale.is_contiguous()
    assert x.numel() == 0 or all(stride % 16 == 0 for stride in q.stride()[:-1])
    check(x, granularity, power_of_two=power_of_two)
    if x.numel() == 0:
        assert bool((scale == 1).all())


def half_ulp(q):
    """Half the distance of neighbours around a value of FP8 E4M3: 3 bits of mantissa."""
    exponent = torch.frexp(q.float().abs().clamp_min(2.0**-6))[1] - 1
    return 2.0 ** (exponent - 4)


finite = strategies.floats(width=32, allow_nan=False, allow_infinity=False)


@granularities
@hypothesis.given(
    values=strategies.lists(finite, min_size=1, max_size=40), power_of_two=strategies.booleans()
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_error_scales_and_order(granularity, values, power_of_two):
    x = torch.tensor(values, dtype=torch.float32)[None]
    q, scale = moe_ext.quantize_fp8(x, granularity, power_of_two=power_of_two)
    s = scale.reshape(())
    assert TINY <= s.item() <= 2.0**120
    assert bool(q.float().isfinite().all())
    quotient = x.double() / s.double()
    # The quotient is rounded to float32 first, and may lie that much beyond 448.
    slack = 2.0**-22 * quotient.abs()
    assert bool(((q.double() - quotient).abs() <= half_ulp(q) + slack).all())
    assert bool((q.float()[x == 0] == 0).all())
    order = x[0].argsort()
    assert bool((q[0, order].float().diff() >= 0).all())
    if power_of_two:
        assert math.frexp(s.item())[0] == 0.5
        plain = moe_ext.quantize_fp8(x, granularity)[1].reshape(())
        assert plain <= s < 2 * plain


@granularities
@pytest.mark.parametrize("size", [0.0, 1e-37, 1e-40, 1e-45])
def test_small_blocks_have_finite_scales(granularity, size):
    x = torch.full((3, 200), size)
    q, scale = moe_ext.quantize_fp8(x, granularity)
    assert bool((scale == (1.0 if size == 0 else TINY)).all())
    assert bool(q.float().isfinite().all())
    # E4M3 goes down to 2**-9, so from 448 * tiny down a value keeps fewer and fewer digits.
    error = (q.float() * expand_scale(scale, granularity, (3, 200)) - x).abs()
    assert bool((error <= max(size / 16, 2.0**-10 * TINY)).all())


@granularities
def test_nan_stays_and_infinity_counts_as_the_largest_float(granularity):
    x = torch.ones(2, 128)
    x[0, 3] = float("nan")
    x[0, 4] = -float("nan")
    q, scale = moe_ext.quantize_fp8(x, granularity)
    assert bool((scale == torch.tensor(1.0) / 448).all())
    assert q.view(torch.uint8)[0, 3:5].tolist() == [0x7F, 0x7F]
    assert int(q.isnan().sum()) == 2
    x[1, 5] = -float("inf")
    q, scale = moe_ext.quantize_fp8(x, granularity)
    largest = torch.tensor(FLOAT_MAX) / 448
    assert scale.reshape(-1)[-1] == largest
    assert q[1, 5].float() == -448
    assert int((q[1].float() != 0).sum()) == 1
    check(x, granularity)


def test_all_nan_has_the_scale_one():
    q, scale = moe_ext.quantize_fp8(torch.full((1, 5), float("nan")), "row")
    assert scale.tolist() == [1.0]
    assert bool(q.isnan().all())


def test_power_of_two_rounds_up():
    exact = torch.tensor([[448.0], [449.0], [447.0], [3.5], [1e-40], [FLOAT_MAX]])
    _, scale = moe_ext.quantize_fp8(exact, "row", power_of_two=True)
    assert scale.tolist() == [1.0, 2.0, 1.0, 2.0**-7, TINY, 2.0**120]


def test_signed_zeros_and_values_that_vanish_keep_their_sign():
    x = torch.tensor([[0.0, -0.0, 1e-30, -1e-30, 448.0]])
    q, _ = moe_ext.quantize_fp8(x, "row")
    assert q.view(torch.uint8).tolist() == [[0x00, 0x80, 0x00, 0x80, 0x7E]]


@pytest.mark.parametrize(("shape", "size"), [((4, 40), ()), ((4, 40), (1,)), ((3, 4, 40), (3,))])
def test_static_scale(shape, size):
    x = spread(shape, torch.bfloat16, "cpu")
    scale = torch.rand(size) + 1e-4
    q, returned = moe_ext.quantize_fp8(x, "tensor", scale=scale)
    assert returned is scale
    expected = x.float() / scale.reshape(-1, *(1,) * (len(shape) - 1))
    assert_bits(q, expected.reshape(shape).clamp(-448, 448).to(FP8))
    again, copied = torch.ops.moe_ext.quantize_fp8(x, "tensor", scale=scale)
    assert_bits(again, q)
    assert_bits(copied, scale)
    written, scale_out = torch.empty(shape, dtype=FP8), torch.empty(size)
    moe_ext.quantize_fp8_out(x, "tensor", q=written, scale_out=scale_out, scale=scale)
    assert_bits(written, q)
    assert_bits(scale_out, scale)


@granularities
@pytest.mark.parametrize("count", [-5, 0, 1, 127, 128, 129, 130, 1000])
def test_rows_past_the_count_do_not_matter(granularity, count):
    x = poison_rows(spread((130, 140), torch.bfloat16, "cpu"), [count])
    check(x, granularity, [count])


@granularities
def test_counts_of_groups(granularity):
    counts = [0, 3, 129, 200, -1, 128]
    x = poison_rows(spread((6, 130, 140), torch.bfloat16, "cpu"), counts)
    check(x, granularity, counts)


@granularities
def test_strided_inputs(granularity):
    base = spread((3, 150, 400), torch.bfloat16, "cpu")
    for x in (
        base[:, ::2, 8:300],
        base[:, :, 1:].transpose(0, 1),
        base[0, 3:4].expand(130, 400),
        base[1].T.contiguous().T[:, :1],
    ):
        check(x, granularity)


def test_q_of_odd_rows_is_a_view_of_padded_memory():
    for k, stride in ((88, 96), (232, 240), (360, 368), (128, 128)):
        q, _ = moe_ext.quantize_fp8(torch.ones(2, 3, k), "row")
        assert q.stride() == (3 * stride, stride, 1)


@granularities
def test_the_chain_into_grouped_gemm(granularity):
    """Scales go into `grouped_gemm` as they are: "row" scales of weights are per channel."""
    of_a = {"row": "row", "tensor": "tensor"}.get(granularity, "1x128")
    a, b = torch.randn(20, 256).bfloat16(), torch.randn(2, 144, 256).bfloat16()
    offs = torch.tensor([7, 20], dtype=torch.int32)
    qa, scale_a = moe_ext.quantize_fp8(a, of_a, num_valid_rows=offs[-1])
    qb, scale_b = moe_ext.quantize_fp8(b, "128x128" if of_a == "1x128" else granularity)
    out = moe_ext.grouped_gemm(qa, qb, offs, scale_a=scale_a, scale_b=scale_b)
    expected = moe_ext.grouped_gemm(a, b, offs).float()
    assert (out.float() - expected).norm() < 0.06 * expected.norm()


def test_reference_takes_one_scale_for_each_group():
    x = spread((3, 4, 5), torch.float32, "cpu")
    q, scale = quantize_fp8_reference(x, "tensor")
    for group in range(3):
        own_q, own_scale = quantize_fp8_reference(x[group], "tensor")
        assert_bits(q[group], own_q)
        assert_bits(scale[group], own_scale)
