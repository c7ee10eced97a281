"""The CPU implementation gives the values of a plain loop, whatever the offsets."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext.reference import (
    grouped_gemm_reference,
    quantize_fp8_per_block,
    quantize_fp8_per_tensor,
)
from support.inputs import CASES, MANY_GROUPS, build_problem, offs_of, poisoned_out
from support.tolerance import assert_close_to_reference, assert_same_bits, assert_untouched

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies  # noqa: E402


def quantize_rows(x):
    return quantize_fp8_per_block(x, (1, 128))


def plain_loop(a, b, offs, scale_a=None, scale_b=None):
    """One row after the other, in float64."""
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    begin = 0
    for group, end in enumerate(offs.tolist()):
        for row in range(begin, end):
            out[row] = b[group].double() @ a[row].double()
            if scale_a is not None:
                out[row] *= scale_a.double().reshape(())
            if scale_b is not None:
                out[row] *= scale_b.double().expand(b.shape[0])[group]
        begin = end
    return out


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "name", ["one_token", "first_middle_last_empty", "n_8", "k_16_bytes", "k_zero"]
)
def test_values_equal_a_plain_loop(name, dtype):
    problem = build_problem(CASES[name], dtype, "random", "cpu")
    out = moe_ext.grouped_gemm(*problem.args, **problem.scales, out_dtype=torch.float32)
    valid = problem.num_valid
    expected = plain_loop(problem.a[:valid], problem.b, problem.offs, *problem.scales.values())
    assert_close_to_reference(out[:valid], expected, problem.offs)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_integers_are_exact(dtype, out_dtype):
    problem = build_problem(CASES["first_middle_last_empty"], dtype, "integers", "cpu")
    out = moe_ext.grouped_gemm(*problem.args, **problem.scales, out_dtype=out_dtype)
    valid = problem.num_valid
    expected = plain_loop(problem.a[:valid], problem.b, problem.offs, *problem.scales.values())
    assert_same_bits(out[:valid], expected.to(out_dtype), problem.offs)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_rows_past_the_last_offset_and_padding_stay_untouched(dtype):
    problem = build_problem(CASES["n_8"], dtype, "random", "cpu")
    out = poisoned_out(problem.a.shape[0], problem.b.shape[1], torch.bfloat16, "cpu")
    moe_ext.grouped_gemm_out(*problem.args, **problem.scales, out=out)
    assert_close_to_reference(out[: problem.num_valid], problem.expected, problem.offs)
    assert_untouched(out[problem.num_valid :])
    assert_untouched(out.as_strided((out.shape[0], 16), out.stride(), out.shape[1]))


def test_4096_groups():
    problem = build_problem(MANY_GROUPS, "bf16", "integers", "cpu")
    out = moe_ext.grouped_gemm(*problem.args)
    assert_same_bits(out[: problem.num_valid], problem.expected.bfloat16(), problem.offs)


def test_no_rows_give_an_empty_result():
    b = torch.randn(3, 8, 16).bfloat16()
    out = moe_ext.grouped_gemm(torch.empty(0, 16).bfloat16(), b, offs_of((0, 0, 0)))
    assert out.shape == (0, 8)
    assert out.dtype is torch.bfloat16


def test_absent_scales_are_one():
    a, b = torch.ones(3, 16).to(torch.float8_e4m3fn), torch.ones(1, 8, 16).to(torch.float8_e4m3fn)
    out = moe_ext.grouped_gemm(a, b, offs_of((3,)))
    assert_same_bits(out, torch.full((3, 8), 16.0).bfloat16())


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_every_per_tensor_shape_of_scale_b(shape):
    a, b = torch.ones(3, 16).to(torch.float8_e4m3fn), torch.ones(2, 8, 16).to(torch.float8_e4m3fn)
    out = moe_ext.grouped_gemm(
        a, b, offs_of((1, 2)), scale_a=torch.tensor([0.5]), scale_b=torch.full(shape, 0.25)
    )
    assert_same_bits(out, torch.full((3, 8), 2.0).bfloat16())


@hypothesis.given(
    rows=strategies.lists(strategies.integers(0, 6), min_size=1, max_size=8),
    tail=strategies.integers(0, 3),
)
@hypothesis.settings(deadline=None, max_examples=50)
def test_any_offsets_give_the_plain_loop(rows, tail):
    offs = offs_of(rows)
    num_valid = sum(rows)
    a = torch.randint(-4, 5, (num_valid + tail, 8)).bfloat16()
    b = torch.randint(-4, 5, (len(rows), 8, 8)).bfloat16()
    out = moe_ext.grouped_gemm(a, b, offs, out_dtype=torch.float32)
    assert_same_bits(out[:num_valid], plain_loop(a, b, offs)[:num_valid].float(), offs)


@hypothesis.given(ends=strategies.lists(strategies.integers(-9, 30), min_size=1, max_size=8))
@hypothesis.settings(deadline=None, max_examples=50)
def test_offsets_outside_the_contract_do_not_fail(ends):
    a, b = torch.ones(20, 8).bfloat16(), torch.ones(len(ends), 8, 8).bfloat16()
    out = moe_ext.grouped_gemm(a, b, torch.tensor(ends, dtype=torch.int32))
    assert out.shape == (20, 8)


def test_reference_writes_the_given_output():
    a, b, out = torch.ones(3, 8), torch.ones(1, 8, 8), torch.zeros(3, 8)
    assert grouped_gemm_reference(a, b, offs_of((2,)), out=out) is out
    assert out.tolist() == [[8.0] * 8, [8.0] * 8, [0.0] * 8]


@pytest.mark.parametrize("num_leading_dims", [0, 1])
def test_quantisation_uses_the_whole_range_and_scales_back(num_leading_dims):
    x = torch.randn(4, 16, 32) * torch.tensor([1e-3, 1.0, 10.0, 0.0])[:, None, None]
    q, scale = quantize_fp8_per_tensor(x, num_leading_dims)
    assert scale.shape == x.shape[:num_leading_dims]
    assert q.float().abs().max() == 448
    back = q.float() * (scale.reshape(-1, 1, 1) if num_leading_dims else scale)
    assert (back - x).abs().max() <= 2**-4 * x.abs().max()
    assert torch.isfinite(back).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_k_zero_as_torch_makes_it(dtype):
    # Its strides are (1, 1) and (n, 1, 1), neither a multiple of 16 bytes nor of any meaning.
    a, b = torch.empty(5, 0, dtype=dtype), torch.empty(2, 8, 0, dtype=dtype)
    out = moe_ext.grouped_gemm(a, b, torch.tensor([2, 5], dtype=torch.int32))
    assert torch.equal(out, torch.zeros(5, 8, dtype=torch.bfloat16))


def test_an_empty_tensor_quantises():
    q, scale = moe_ext.reference.quantize_fp8_per_tensor(torch.empty(0, 16))
    assert q.shape == (0, 16)
    assert scale.item() == 1.0


@pytest.mark.parametrize(
    ("n", "k", "n_segments", "n_offset", "blocks"),
    [
        (64, 64, 1, 64, (1, 1)),  # one block, whose shape alone would say "one per group"
        (64, 64, 2, 0, (2, 1, 1)),
        (256, 128, 2, 8, (2, 2, 1)),
        (512, 256, 2, 8, (2, 3, 2)),
        (4, 64, 2, 127, (4, 1)),  # two segments of two blocks: the shape of one per channel
    ],
)
def test_blocks_that_their_shape_does_not_give_away(n, k, n_segments, n_offset, blocks):
    a, b = torch.ones(5, k).to(torch.float8_e4m3fn), torch.ones(2, n, k).to(torch.float8_e4m3fn)
    scale_b = torch.arange(1.0, 1 + 2 * torch.Size(blocks).numel()).reshape(2, *blocks)
    out = moe_ext.grouped_gemm(
        a,
        b,
        offs_of((2, 3)),
        scale_b=scale_b,
        n_segments=n_segments,
        scale_b_offset=(n_offset, 0),
        out_dtype=torch.float32,
    )
    flat = scale_b.reshape(2, n_segments, -1, scale_b.shape[-1])
    each = n // n_segments
    for row, group in ((0, 0), (1, 0), (2, 1), (4, 1)):
        for column in range(0, n, max(1, n // 16)):
            block = (column % each + n_offset) // 128
            of_k = flat[group, column // each, block]
            wanted = sum(float(of_k[i // 128]) for i in range(k))
            assert out[row, column] == wanted


@pytest.mark.parametrize("quantise", [quantize_fp8_per_tensor, quantize_rows])
def test_the_smallest_values_quantise_to_finite_scales(quantise):
    for x in (torch.full((1, 16), 1e-44), torch.full((1, 16), 1e-37), torch.zeros(1, 16)):
        q, scale = quantise(x)
        assert torch.isfinite(q.float()).all()
        assert (scale > 0).all()
        assert torch.allclose(q.float() * scale, x, rtol=2**-4, atol=1e-43)
