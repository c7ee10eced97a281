"""Conversion of scales and padding of rows."""

from __future__ import annotations

import math

import moe_ext
import pytest
import torch
from support.tolerance import assert_same_bits

E8M0 = torch.arange(256, dtype=torch.uint8)
POWERS = [2.0 ** (e - 127) for e in range(255)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_keep_their_values(dtype):
    scale = torch.randn(3, 5).to(dtype)
    assert_same_bits(moe_ext.scales_to_float32(scale), scale.float())


def test_float32_comes_back_as_it_is():
    scale = torch.randn(3, 5)
    assert moe_ext.scales_to_float32(scale) is scale


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_e8m0_gives_every_power_of_two(dtype):
    result = moe_ext.scales_to_float32(E8M0.view(dtype))
    assert result.dtype is torch.float32
    assert result[:255].tolist() == POWERS
    assert result[0].item() == 2.0**-127
    assert math.isnan(result[255].item())


def test_e8m0_of_any_strides():
    scale = E8M0.reshape(16, 16).T
    expected = moe_ext.scales_to_float32(E8M0).reshape(16, 16).T
    assert_same_bits(moe_ext.scales_to_float32(scale), expected)


@pytest.mark.parametrize("num_columns", [0, 1, 4, 7, 56])
def test_int32_holds_four(num_columns):
    words = -(-num_columns // 4)
    exponents = torch.randint(0, 256, (5, 4 * words), dtype=torch.uint8)
    packed = exponents.view(torch.int32) if words else torch.empty(5, 0, dtype=torch.int32)
    expected = moe_ext.scales_to_float32(exponents)[:, :num_columns]
    assert_same_bits(moe_ext.scales_to_float32(packed, num_columns=num_columns), expected)
    # As DeepGEMM lays them out: rows next to each other.
    column_major = packed.T.contiguous().T
    assert_same_bits(moe_ext.scales_to_float32(column_major, num_columns=num_columns), expected)


def test_conversion_errors():
    with pytest.raises(ValueError, match=r"^scales_to_float32: `scale` must be .*, got float64$"):
        moe_ext.scales_to_float32(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"`num_columns` must be None .*, got 3 for uint8$"):
        moe_ext.scales_to_float32(E8M0, num_columns=3)
    packed = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"`num_columns` must be a number .*got None"):
        moe_ext.scales_to_float32(packed)
    with pytest.raises(ValueError, match=r"= 2 elements in its last dimension, got shape \(2, 3\)"):
        moe_ext.scales_to_float32(packed, num_columns=8)


@pytest.mark.parametrize("k", [1, 88, 232, 360])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_padded_rows_hold_the_same_values(k, dtype, device):
    x = torch.randn(2, 3, k, device=device).to(dtype)
    padded = moe_ext.pad_rows(x)
    assert padded.shape == x.shape
    assert_same_bits(padded, x)
    assert padded.stride(-1) == 1
    assert all(stride * x.itemsize % 16 == 0 for stride in padded.stride()[:-1])
    assert padded.data_ptr() % 16 == 0
    assert moe_ext.pad_rows(padded) is padded


def test_what_is_aligned_comes_back_as_it_is():
    x = torch.randn(4, 64)
    for aligned in (x, x[:, :7], x[:, 4:], x[0], x[:0], x[:, :0]):
        assert moe_ext.pad_rows(aligned) is aligned
    for other in (x[:, 1:], x.T, torch.randn(4, 7), torch.randn(8)[1:]):
        padded = moe_ext.pad_rows(other)
        assert padded is not other
        assert_same_bits(padded, other)


def test_pad_rows_compiles():
    torch._dynamo.reset()
    compiled = torch.compile(moe_ext.pad_rows, fullgraph=True, backend="eager")
    for k in (7, 16):
        x = torch.randn(3, k)
        assert_same_bits(compiled(x), x)


def test_pad_rows_error():
    with pytest.raises(ValueError, match=r"^pad_rows: `x` must have shape \(\.\.\., k\), got \(\)"):
        moe_ext.pad_rows(torch.tensor(1.0))


def test_rows_that_overlap_are_copied():
    expanded = torch.ones(1, 16, dtype=torch.uint8).expand(3, 16)
    padded = moe_ext.pad_rows(expanded)
    assert padded.stride() == (16, 1)
    assert torch.equal(padded, expanded)


@pytest.mark.parametrize("convert", [moe_ext.pad_rows, moe_ext.scales_to_float32])
@pytest.mark.parametrize("value", [None, 1.0, [1]])
def test_what_is_no_tensor(convert, value):
    with pytest.raises(ValueError, match="must be a tensor, got"):
        convert(value)


@pytest.mark.parametrize("columns", [None, True, 3.0, -3])
def test_columns_that_are_no_number(columns):
    with pytest.raises(ValueError, match="`num_columns` must be a number of columns"):
        moe_ext.scales_to_float32(torch.zeros(2, 1, dtype=torch.int32), num_columns=columns)
