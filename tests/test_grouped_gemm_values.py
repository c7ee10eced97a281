"""Values of what the reference computes, against loops that share no code with it."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from support.inputs import offs_of

FP8 = torch.float8_e4m3fn
GROUPS, N, K = 3, 24, 40
ROWS = (2, 0, 5)


def integers(*shape):
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(sum(shape)))


def groups_of_rows():
    return [group for group, rows in enumerate(ROWS) for _ in range(rows)]


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_each_group_has_its_own_bias(dtype, bias_dtype):
    k = 48
    a, b = integers(sum(ROWS), k).to(dtype), integers(GROUPS, N, k).to(dtype)
    bias = torch.arange(GROUPS * N).reshape(N, GROUPS).T.to(bias_dtype)
    out = moe_ext.grouped_gemm(a, b, offs_of(ROWS), bias=bias, out_dtype=torch.float32)
    for row, group in enumerate(groups_of_rows()):
        for column in range(N):
            wanted = bias[group, column].item()
            wanted += sum((a[row].float() * b[group, column].float()).tolist())
            assert out[row, column].item() == wanted


def test_a_masked_group_has_its_own_bias():
    a = torch.zeros(2, 3, 16).bfloat16()
    b = torch.ones(2, 8, 16).bfloat16()
    bias = torch.arange(16.0).reshape(2, 8)
    out = moe_ext.grouped_gemm_masked(a, b, torch.tensor([1, 3], dtype=torch.int32), bias=bias)
    assert out[0, 0].tolist() == bias[0].tolist()
    assert out[1].tolist() == [bias[1].tolist()] * 3


def test_bias_is_what_an_empty_sum_gives():
    a, b = torch.empty(3, 0).bfloat16(), torch.empty(2, 8, 0).bfloat16()
    bias = torch.arange(16.0).reshape(2, 8)
    out = moe_ext.grouped_gemm(a, b, offs_of((1, 2)), bias=bias)
    assert out.tolist() == [bias[0].tolist(), bias[1].tolist(), bias[1].tolist()]


@pytest.mark.parametrize(("n0", "k0"), [(0, 1), (0, 127), (100, 104), (127, 64)])
@pytest.mark.parametrize("n_segments", [1, 2])
def test_blocks_that_begin_before_the_shard(n0, k0, n_segments):
    n, k = 160, 272
    each = n // n_segments
    blocks = (-(-(n0 + each) // 128), -(-(k0 + k) // 128))
    a, b = integers(sum(ROWS), k).to(FP8), integers(GROUPS, n, k).to(FP8)
    scale_a = 2.0 ** integers(sum(ROWS), -(-k // 128))
    scale_b = 2.0 ** integers(GROUPS, n_segments, *blocks)
    out = moe_ext.grouped_gemm(
        a,
        b,
        offs_of(ROWS),
        scale_a=scale_a,
        scale_b=scale_b,
        n_segments=n_segments,
        scale_b_offset=(n0, k0),
        out_dtype=torch.float32,
    )
    for row, group in enumerate(groups_of_rows()):
        for column in (0, 27, 28, each - 1, n - 1):
            products = (a[row].float() * b[group, column].float()).tolist()
            of_blocks = scale_b[group, column // each, (column % each + n0) // 128]
            wanted = sum(
                product * scale_a[row, i // 128].item() * of_blocks[(i + k0) // 128].item()
                for i, product in enumerate(products)
            )
            assert out[row, column].item() == wanted


def test_a_masked_scale_for_each_group(device):
    a = torch.ones(2, 3, 16, device=device).to(FP8)
    b = torch.ones(2, 8, 16, device=device).to(FP8)
    q, scale = moe_ext.quantize_fp8(
        (torch.ones(2, 3, 16) * torch.tensor([[[1.0]], [[3.0]]])).to(device), "tensor"
    )
    counts = torch.tensor([3, 2], dtype=torch.int32, device=device)
    out = moe_ext.grouped_gemm_masked(q, b, counts, scale_a=scale)
    assert scale.shape == (2,)
    assert out[0, :, 0].tolist() == [16.0] * 3
    assert out[1, :2, 0].tolist() == [48.0] * 2
    of_groups = torch.tensor([2.0, 5.0], device=device)
    out = moe_ext.grouped_gemm_masked(a, b, counts, scale_a=of_groups)
    assert out[1, 0, 0].item() == 80.0


def test_empty_operands_have_no_strides_to_mind():
    for max_rows, n in ((0, 8), (3, 0)):
        a = torch.empty(2, max_rows, 200).to(FP8)
        b = torch.empty(2, n, 200).to(FP8)
        counts = torch.zeros(2, dtype=torch.int32)
        out = moe_ext.grouped_gemm_masked(moe_ext.pad_rows(a), moe_ext.pad_rows(b), counts)
        assert out.shape == (2, max_rows, n)


@pytest.mark.parametrize("name", ["a", "b", "offs"])
def test_none_for_a_tensor(name):
    arguments = {
        "a": torch.ones(3, 16).bfloat16(),
        "b": torch.ones(2, 8, 16).bfloat16(),
        "offs": offs_of((1, 2)),
    } | {name: None}
    with pytest.raises(ValueError, match=f"grouped_gemm: `{name}` must be a tensor, got None"):
        moe_ext.grouped_gemm(**arguments)
