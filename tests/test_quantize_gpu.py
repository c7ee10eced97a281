"""The quantise kernels bit for bit against the reference, on the GPU, in the middle of NaN."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext.reference import quantize_fp8_reference
from support.inputs import in_poison, offs_of, poisoned
from support.quantize import (
    DTYPES,
    FP8,
    GRANULARITIES,
    assert_bits,
    assert_outputs,
    check,
    poison_rows,
    poisoned_outputs,
    scale_shape,
    spread,
)
from support.tolerance import assert_close_to_reference

pytestmark = pytest.mark.gpu

COLUMNS = (1, 7, 88, 127, 128, 129, 232, 360, 2880, 7168)
ROWS = (0, 1, 127, 129, 1000)
# Rows that take one warp, several, all of a CTA, and more than a CTA holds.
LONG_ROWS = (1024, 1032, 16384, 32768, 32776, 70000)

granularities = pytest.mark.parametrize("granularity", GRANULARITIES)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@granularities
@dtypes
@pytest.mark.parametrize("k", COLUMNS)
def test_every_size(granularity, dtype, k):
    for rows in ROWS:
        x = spread((rows, k), DTYPES[dtype], "cuda")
        check(x, granularity)
        # Rows at 16 bytes although k is odd, as in padded activations.
        check(in_poison(x), granularity)


@granularities
@dtypes
@pytest.mark.parametrize("k", LONG_ROWS)
def test_long_rows(granularity, dtype, k):
    check(spread((3, k), DTYPES[dtype], "cuda"), granularity)


@granularities
@dtypes
def test_powers_of_two(granularity, dtype):
    for shape in ((129, 360), (3, 70, 256)):
        x = spread(shape, DTYPES[dtype], "cuda")
        check(x, granularity, power_of_two=True)
    edges = torch.tensor([448.0, 449.0, 447.0, 1e-37, 1e-40, 3.4e38, 0.0], device="cuda")
    check(edges[:, None].to(DTYPES[dtype]), granularity, power_of_two=True)


@granularities
@dtypes
def test_groups(granularity, dtype):
    for shape in ((0, 5, 64), (3, 0, 64), (3, 5, 0), (1, 1, 1), (5, 130, 136), (300, 3, 40)):
        check(spread(shape, DTYPES[dtype], "cuda"), granularity)


@granularities
@dtypes
def test_the_functional_op(granularity, dtype):
    for shape in ((129, 360), (3, 70, 256), (0, 16), (4, 0), (2, 0, 16)):
        x = spread(shape, DTYPES[dtype], "cuda")
        q, scale = moe_ext.quantize_fp8(x, granularity)
        expected_q, expected_scale = quantize_fp8_reference(x, granularity)
        assert_bits(q, expected_q)
        assert_bits(scale, expected_scale)
        assert x.numel() == 0 or all(stride % 16 == 0 for stride in q.stride()[:-1])


@granularities
@dtypes
def test_the_cpu_gives_the_same_bits(granularity, dtype):
    for shape in ((130, 300), (2, 3, 136)):
        x = spread(shape, DTYPES[dtype], "cpu")
        for options in ({}, {"power_of_two": True}):
            q, scale = moe_ext.quantize_fp8(x.cuda(), granularity, **options)
            expected_q, expected_scale = moe_ext.quantize_fp8(x, granularity, **options)
            assert_bits(q.cpu(), expected_q)
            assert_bits(scale.cpu(), expected_scale)


@granularities
@dtypes
def test_strides(granularity, dtype):
    base = spread((3, 150, 400), DTYPES[dtype], "cuda")
    for x in (
        base[:, ::2, 8:304],
        base[:, :, 1:200],
        base.transpose(0, 1),
        base[0, 3:4].expand(130, 400),
        base[1].T.contiguous().T[:, :1],
        base[:, :, 16:144][:1],
    ):
        check(x, granularity)


@granularities
@dtypes
@pytest.mark.parametrize("size", [0.0, 1e-37, 1e-40, 1e-45, 1e37, 3.3e38])
def test_blocks_of_extreme_size(granularity, dtype, size):
    x = torch.randn(130, 264, device="cuda").clamp(-1, 1)
    x[0, 0] = 1
    x = (x.double() * size).float().to(DTYPES[dtype])
    check(x, granularity)
    if size == 0:
        x[:, :128], x[:5] = 3, -0.0
        check(x, granularity)


@granularities
@dtypes
def test_nan_and_infinity(granularity, dtype):
    x = spread((130, 264), DTYPES[dtype], "cuda")
    x[3, 5], x[3, 6], x[129, 263] = float("nan"), -float("nan"), float("nan")
    check(x, granularity)
    x[0], x[7, 130], x[8, 1] = float("nan"), float("inf"), -float("inf")
    check(x, granularity)
    check(torch.full((3, 136), float("nan"), device="cuda").to(DTYPES[dtype]), granularity)


def test_every_bfloat16_under_many_scales():
    """Each value of the type, through the divisions that the kernels do without dividing."""
    bits = torch.arange(65536, device="cuda").to(torch.int16).view(torch.bfloat16)
    x = bits.reshape(256, 256)
    for scale in torch.logspace(-37, 37, 75, device="cuda"):
        check(x, "tensor", scale=scale)
    for scale in torch.rand(50, device="cuda") + 0.01:
        check(x, "tensor", scale=scale)


@granularities
def test_every_scale_of_a_block(granularity):
    """Blocks whose largest value takes each mantissa of a bfloat16."""
    largest = torch.arange(0x3F80, 0x4080, device="cuda").to(torch.int16).view(torch.bfloat16)
    x = torch.rand(256, 256, device="cuda").bfloat16() * largest[:, None]
    x[:, ::128] = largest[:, None]
    check(x, granularity)


@dtypes
def test_static_scales(dtype):
    x = spread((70, 360), DTYPES[dtype], "cuda")
    for size in ((), (1,)):
        scale = torch.full(size, 0.037, device="cuda")
        q, returned = moe_ext.quantize_fp8(x, "tensor", scale=scale)
        assert returned is scale
        assert_bits(q, quantize_fp8_reference(x, "tensor", scale=scale)[0])
        copied = torch.ops.moe_ext.quantize_fp8(x, "tensor", scale=scale)[1]
        assert_bits(copied, scale)
    scales = torch.rand(5, 2, device="cuda")[:, 0] + 0.01
    check(spread((5, 33, 136), DTYPES[dtype], "cuda"), "tensor", scale=scales)
    empty, _ = moe_ext.quantize_fp8(x[:0], "tensor", scale=scale)
    assert empty.shape == (0, 360)


@granularities
@dtypes
@pytest.mark.parametrize("count", [-5, 0, 1, 127, 128, 129, 130, 2**31 - 1, -(2**31)])
def test_rows_past_the_count_do_not_matter(granularity, dtype, count):
    x = poison_rows(spread((130, 264), DTYPES[dtype], "cuda"), [min(count, 130)])
    check(x, granularity, [count])


@granularities
@dtypes
def test_counts_of_groups(granularity, dtype):
    counts = [0, 3, 129, 200, -1, 128]
    check(poison_rows(spread((6, 130, 136), DTYPES[dtype], "cuda"), counts), granularity, counts)


@granularities
def test_a_static_scale_and_counts(granularity):
    if granularity != "tensor":
        pytest.skip("takes no static scale")
    counts = [2, 0, 7]
    x = poison_rows(spread((3, 7, 136), torch.bfloat16, "cuda"), counts)
    q, scale = poisoned((3, 7, 136), FP8, "cuda"), torch.zeros(3, device="cuda")
    given = torch.tensor([0.5, 0.25, 2.0], device="cuda")
    valid = torch.tensor(counts, dtype=torch.int32, device="cuda")
    moe_ext.quantize_fp8_out(x, "tensor", q=q, scale_out=scale, scale=given, num_valid_rows=valid)
    assert_bits(scale, given)
    for group, count in enumerate(counts):
        expected, _ = quantize_fp8_reference(x[group, :count], "tensor", scale=given[group])
        assert_bits(q[group, :count], expected)


@granularities
def test_the_last_offset_is_a_count(granularity):
    offs = offs_of([40, 0, 33], "cuda")
    x = poison_rows(spread((130, 264), torch.bfloat16, "cuda"), [73])
    q, _, scale = poisoned_outputs(granularity, (130, 264), "cuda")
    for count in (offs[-1], offs[-1:]):
        moe_ext.quantize_fp8_out(x, granularity, q=q, scale_out=scale, num_valid_rows=count)
        assert_outputs(x, granularity, q, scale, [73])


@granularities
def test_counts_may_change_between_replays(granularity):
    x = spread((130, 264), torch.bfloat16, "cuda")
    q, _, scale = poisoned_outputs(granularity, (130, 264), "cuda")
    count = torch.tensor([130], dtype=torch.int32, device="cuda")

    def call():
        moe_ext.quantize_fp8_out(x, granularity, q=q, scale_out=scale, num_valid_rows=count)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for valid in (130, 5, 0, 128, 1, 130):
        count.fill_(valid)
        x.copy_(spread((130, 264), torch.bfloat16, "cuda") * (1 + valid))
        x[valid:] = float("nan")
        fresh_q, _, fresh_scale = poisoned_outputs(granularity, (130, 264), "cuda")
        q.copy_(fresh_q)
        scale.copy_(fresh_scale)
        graph.replay()
        assert_outputs(x, granularity, q, scale, [valid])


@granularities
def test_runs_on_the_current_stream(granularity):
    source = spread((130, 264), torch.bfloat16, "cuda")
    x = torch.zeros_like(source)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        x.copy_(source)
        q, scale = moe_ext.quantize_fp8(x, granularity)
    # A kernel on the default stream would have finished before the copy.
    stream.synchronize()
    expected_q, expected_scale = quantize_fp8_reference(source, granularity)
    assert_bits(q, expected_q)
    assert_bits(scale, expected_scale)


@granularities
def test_does_not_synchronise(granularity):
    x = spread((130, 264), torch.bfloat16, "cuda")
    offs = offs_of([40, 33], "cuda")
    moe_ext.quantize_fp8(x, granularity)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe_ext.quantize_fp8(x, granularity, num_valid_rows=offs[-1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@granularities
def test_more_than_2_31_values(granularity):
    rows, k, tail = 2**19 + 3, 4096, 300
    # One row of values, repeated by a stride of 0.
    x = spread((1, k), torch.bfloat16, "cuda").expand(rows, k)
    q = torch.empty(rows, k, dtype=FP8, device="cuda")
    q[-tail:] = poisoned((tail, k), FP8, "cuda")
    scale = torch.zeros(scale_shape(granularity, (rows, k)), device="cuda")
    moe_ext.quantize_fp8_out(x, granularity, q=q, scale_out=scale)
    expected_q, expected_scale = quantize_fp8_reference(x[:1], granularity)
    assert_bits(q[-tail:], expected_q.expand(tail, k).contiguous())
    assert_bits(scale if granularity == "tensor" else scale[-1:], expected_scale)


@granularities
@pytest.mark.parametrize("num_rows", [1, 73, 400])
def test_the_chain_into_grouped_gemm(granularity, num_rows):
    of_a = granularity if granularity in ("row", "tensor") else "1x128"
    of_b = "128x128" if of_a == "1x128" else granularity
    a = torch.randn(num_rows + 5, 512, device="cuda").bfloat16()
    a[num_rows:] = float("nan")
    b = torch.randn(3, 384, 512, device="cuda").bfloat16()
    offs = offs_of([num_rows // 2, 0, num_rows - num_rows // 2], "cuda")
    qa, scale_a = moe_ext.quantize_fp8(a, of_a, num_valid_rows=offs[-1])
    qb, scale_b = moe_ext.quantize_fp8(b, of_b)
    out = moe_ext.grouped_gemm(
        qa, qb, offs, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32
    )[:num_rows]
    exact = moe_ext.reference.grouped_gemm_reference(
        qa, qb, offs, scale_a, scale_b, out_dtype=torch.float32
    )[:num_rows]
    assert_close_to_reference(out, exact, offs)
    plain = moe_ext.grouped_gemm(a, b, offs, out_dtype=torch.float32)[:num_rows]
    assert (out - plain).norm() < 0.06 * plain.norm()
