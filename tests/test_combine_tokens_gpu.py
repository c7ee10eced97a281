"""The combination's kernels bit for bit against a float32 loop in the same order."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext._library import device_kernels
from moe_ext.reference import combine_tokens_reference
from support.inputs import poisoned
from support.tokens import combine_by_loop, draw_ids
from support.tolerance import assert_same_bits, assert_untouched

pytestmark = pytest.mark.gpu

NAN = float("nan")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PADDING = 24

out_dtypes = pytest.mark.parametrize("out_dtype", DTYPES)


def problem(num_tokens, top_k, hidden, strange=0.2, spare=3):
    """Rows sorted by expert, NaN in all that no slot has and between them."""
    ids = draw_ids(num_tokens, top_k, 16, strange=strange)
    offs, _, slot_row = moe_ext.sort_tokens(ids, 16)
    rows = int(offs[-1])
    y = poisoned((ids.numel() + spare, hidden + PADDING), torch.bfloat16, "cuda")[:, :hidden]
    y[:rows] = torch.randn(rows, hidden, device="cuda").bfloat16()
    return y, slot_row.cuda(), torch.rand(num_tokens, top_k, device="cuda")


def combine_into_poison(y, slot_row, weights, top_k, addend, routed_scale, out_dtype):
    num_tokens, hidden = slot_row.numel() // top_k, y.shape[1]
    store = poisoned((num_tokens + 2, hidden + PADDING), out_dtype, "cuda")
    out = store[1 : num_tokens + 1, :hidden]
    device_kernels(0).combine_tokens_configured(
        y, slot_row, weights, addend, out, top_k, routed_scale
    )
    assert_untouched(store[:1])
    assert_untouched(store[num_tokens + 1 :])
    assert_untouched(store[:, hidden:])
    return out


def check(y, slot_row, weights, top_k, addend=None, routed_scale=1.0, out_dtype=torch.bfloat16):
    out = combine_into_poison(y, slot_row, weights, top_k, addend, routed_scale, out_dtype)
    options = {"top_k": top_k, "addend": addend, "routed_scale": routed_scale}
    expected = combine_tokens_reference(y, slot_row, weights, out_dtype=out_dtype, **options)
    assert bool(expected.isfinite().all())
    if out.numel():
        assert_same_bits(out, expected)


@out_dtypes
@pytest.mark.parametrize("top_k", range(1, 33))
def test_every_number_of_choices(top_k, out_dtype):
    for num_tokens in (1, 9):
        y, slot_row, weights = problem(num_tokens, top_k, 136)
        check(y, slot_row, weights, top_k, out_dtype=DTYPES[out_dtype])


def test_against_a_plain_loop():
    for top_k in (1, 2, 3, 8, 11):
        y, slot_row, weights = problem(7, top_k, 264)
        addend = torch.randn(7, 264, device="cuda")
        out = combine_into_poison(y, slot_row, weights, top_k, addend, 2.5, torch.float32)
        expected = combine_by_loop(y, slot_row, weights, top_k, addend, 2.5, torch.float32)
        assert_same_bits(out, expected)


@out_dtypes
@pytest.mark.parametrize("hidden", [8, 16, 40, 120, 128, 1032, 2048, 2880, 7168])
def test_every_width(hidden, out_dtype):
    for num_tokens in (0, 1, 3, 33, 700):
        y, slot_row, weights = problem(num_tokens, 8, hidden)
        check(y, slot_row, weights, 8, out_dtype=DTYPES[out_dtype])


@out_dtypes
@pytest.mark.parametrize("addend", [None, "bf16", "fp32"])
@pytest.mark.parametrize("weights", [None, "bf16", "fp32"])
def test_every_type(weights, addend, out_dtype):
    y, slot_row, factors = problem(50, 6, 520)
    if weights is not None:
        weights = factors.to(DTYPES[weights])
    if addend is not None:
        wide = poisoned((50, 520 + PADDING), DTYPES[addend], "cuda")
        wide[:, :520] = torch.randn(50, 520, device="cuda").to(DTYPES[addend])
        addend = wide[:, :520]
    for routed_scale in (1.0, 2.5, 0.1):
        check(y, slot_row, weights, 6, addend, routed_scale, DTYPES[out_dtype])


def test_weights_of_any_strides():
    y, slot_row, _ = problem(30, 5, 64)
    weights = torch.rand(20, 60, device="cuda")
    check(y, slot_row, weights.T[::2, ::4], 5)
    check(y, slot_row, weights[:1, :5].expand(30, 5), 5)
    check(y, slot_row, weights[0, :30, None].expand(30, 5), 5)


@pytest.mark.parametrize("row", [-1, -(2**31), 2**31 - 1, "rows"])
def test_slots_without_a_row_are_never_read(row):
    y = poisoned((40, 128), torch.bfloat16, "cuda")
    y[:20] = 1.0
    y = y[:20]
    weights = torch.full((10, 4), NAN, device="cuda")
    weights[:, 1] = 2.0
    slot_row = torch.full((10, 4), 20 if row == "rows" else row, dtype=torch.int32, device="cuda")
    slot_row[:, 1] = torch.arange(10, dtype=torch.int32, device="cuda")
    slot_row[7] = -1
    out = moe_ext.combine_tokens(y, slot_row.flatten(), weights, top_k=4)
    expected = torch.full((10, 128), 2.0, device="cuda").bfloat16()
    expected[7] = 0.0
    assert_same_bits(out, expected)


def test_no_rows_at_all():
    slot_row = torch.zeros(6, dtype=torch.int32, device="cuda")
    y = torch.empty(0, 64, dtype=torch.bfloat16, device="cuda")
    addend = torch.randn(3, 64, device="cuda").bfloat16()
    assert_same_bits(moe_ext.combine_tokens(y, slot_row, None, top_k=2, addend=addend), addend)


def test_nan_of_a_row_that_counts_stays():
    y = torch.ones(2, 8, device="cuda").bfloat16()
    y[1, 3] = NAN
    slot_row = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    out = moe_ext.combine_tokens(y, slot_row, None, top_k=2)
    assert out.isnan().tolist() == [[column == 3 for column in range(8)]]


@pytest.mark.parametrize("num_tokens", [1, 8192])
def test_a_large_layer(num_tokens):
    y, slot_row, weights = problem(num_tokens, 8, 7168)
    check(y, slot_row, weights, 8)


def test_more_than_2_31_elements():
    hidden, rows = 7168, 2**31 // 7168 + 100
    y = torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda")
    y[-1:] = torch.randn(1, hidden, device="cuda").bfloat16()
    slot_row = torch.tensor([rows - 1, -1], dtype=torch.int32, device="cuda")
    out = moe_ext.combine_tokens(y, slot_row, None, top_k=2)
    assert_same_bits(out, y[-1:])


def test_inputs_may_change_between_replays():
    y, slot_row, weights = problem(60, 8, 512)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        moe_ext.combine_tokens(y, slot_row, weights, top_k=8)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_ext.combine_tokens(y, slot_row, weights, top_k=8)
    for step in range(100):
        fresh_y, fresh_rows, fresh_weights = problem(60, 8, 512, strange=step / 100)
        y.copy_(fresh_y)
        slot_row.copy_(fresh_rows)
        weights.copy_(fresh_weights)
        out.fill_(NAN)
        graph.replay()
        assert_same_bits(out, combine_tokens_reference(y, slot_row, weights, top_k=8))


def test_runs_on_the_current_stream():
    source, slot_row, weights = problem(60, 8, 512)
    y = torch.zeros_like(source)
    moe_ext.combine_tokens(y, slot_row, weights, top_k=8)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        y.copy_(source)
        out = moe_ext.combine_tokens(y, slot_row, weights, top_k=8)
    stream.synchronize()
    assert_same_bits(out, combine_tokens_reference(source, slot_row, weights, top_k=8))


def test_does_not_synchronise():
    y, slot_row, weights = problem(60, 8, 512)
    moe_ext.combine_tokens(y, slot_row, weights, top_k=8)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe_ext.combine_tokens(y, slot_row, weights, top_k=8)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cpu_and_cuda_agree():
    y, slot_row, weights = problem(40, 8, 256)
    addend = torch.randn(40, 256, device="cuda")
    options = {"top_k": 8, "routed_scale": 1.7}
    out = moe_ext.combine_tokens(y, slot_row, weights, addend=addend, **options)
    on_cpu = moe_ext.combine_tokens(
        y.cpu(), slot_row.cpu(), weights.cpu(), addend=addend.cpu(), **options
    )
    assert_same_bits(out.cpu(), on_cpu)
