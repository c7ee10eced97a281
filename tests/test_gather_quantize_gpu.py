"""Rows gathered and quantised in one go: bit for bit `quantize_fp8` of the gathered rows."""

from __future__ import annotations

import pytest
import torch
from moe_ext import _library
from moe_ext.reference import quantize_fp8_reference
from support.gather import FORMATS, GRANULARITIES, STATIC_SCALE, Outputs, gather
from support.inputs import in_poison, poisoned
from support.quantize import FP8, assert_bits, spread
from support.tolerance import assert_untouched

pytestmark = pytest.mark.gpu

# Blocks and chunks with and without a rest, and rows longer than a CTA holds.
HIDDEN = (8, 64, 88, 128, 136, 512, 520, 2048, 2880, 7168, 8200, 33000)

formats = pytest.mark.parametrize("name", FORMATS)
programmatic = pytest.mark.parametrize("programmatic", [False, True])


def assert_gathered(name, rows, out, valid):
    """`rows` are the gathered ones in BF16; the first `valid` count."""
    assert_untouched(out.values[valid:])
    assert_untouched(out.store[:, rows.shape[1] :])
    if name == "bf16":
        assert_bits(out.values[:valid], rows[:valid])
        return
    static = torch.full((), STATIC_SCALE, device="cuda") if name == "static" else None
    q, scale = quantize_fp8_reference(rows[:valid], GRANULARITIES[name], scale=static)
    assert_bits(out.values[:valid], q)
    if name != "static":
        assert_bits(out.scale[:valid], scale)
        assert_untouched(out.scale[valid:])


def slots_of(num_rows, num_tokens, top_k):
    generator = torch.Generator().manual_seed(7)
    slots = torch.randint(0, num_tokens * top_k, (num_rows,), generator=generator)
    return slots.to(torch.int32).cuda()


def check(name, num_tokens, top_k, hidden, max_rows, valid, weights_dtype=None, **options):
    x = in_poison(spread((num_tokens, hidden), torch.bfloat16, "cuda"))
    row_slot = slots_of(max_rows, num_tokens, top_k)
    rows = x[row_slot.long() // top_k]
    weights = None
    if weights_dtype is not None:
        weights = torch.randn(num_tokens, 2 * top_k, device="cuda").to(weights_dtype)[:, ::2]
        factors = weights[row_slot.long() // top_k, row_slot.long() % top_k].float()
        rows = (rows.float() * factors[:, None]).bfloat16()
    row_slot[valid:] = -1  # as the sort leaves it
    out = Outputs(name, max_rows, hidden)
    gather(name, x, row_slot, top_k, out, num_rows=valid, weights=weights, **options)
    assert_gathered(name, rows, out, valid)


@formats
@pytest.mark.parametrize("hidden", HIDDEN)
def test_sizes(name, hidden):
    for max_rows, valid in ((1, 1), (8, 8), (8, 5), (40, 39), (300, 299)):
        check(name, 5, 8, hidden, max_rows, valid)


@formats
@pytest.mark.parametrize("hidden", [136, 2048, 7168])
@programmatic
def test_many_rows(name, hidden, programmatic):
    check(name, 700, 8, hidden, 5600, 5599, programmatic=programmatic)
    check(name, 700, 8, hidden, 5600, 17, programmatic=programmatic)


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [88, 2048, 33000])
def test_weights(name, dtype, hidden):
    for max_rows in (8, 900):
        check(name, 30, 4, hidden, max_rows, max_rows - 1, weights_dtype=dtype)


@formats
def test_no_valid_row(name):
    x = poisoned((4, 256), torch.bfloat16, "cuda")
    for valid in (0, -1, -(2**31)):
        out = Outputs(name, 32, 256)
        gather(name, x, slots_of(32, 4, 8), 8, out, num_rows=valid)
        assert_untouched(out.store)
        if out.scale is not None:
            assert_untouched(out.scale)


@formats
def test_counts_are_clamped(name):
    x = spread((4, 256), torch.bfloat16, "cuda")
    row_slot = slots_of(32, 4, 8)
    for valid in (32, 33, 2**31 - 1):
        out = Outputs(name, 32, 256)
        gather(name, x, row_slot, 8, out, num_rows=valid)
        assert_gathered(name, x[row_slot.long() // 8], out, 32)


@formats
def test_slots_that_are_none_are_left_out(name):
    """Memory safety whatever the row map holds."""
    x = spread((4, 256), torch.bfloat16, "cuda")
    row_slot = slots_of(32, 4, 8)
    bad = torch.tensor([-1, 32, 2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    row_slot[4:8] = bad
    out = Outputs(name, 32, 256)
    gather(name, x, row_slot, 8, out)
    assert_untouched(out.values[4:8])
    kept = torch.cat([row_slot[:4], row_slot[8:]]).long()
    values = torch.cat([out.values[:4].view(torch.uint8), out.values[8:].view(torch.uint8)])
    if name == "bf16":
        assert_bits(values, x[kept // 8].contiguous().view(torch.uint8))
        return
    static = torch.full((), STATIC_SCALE, device="cuda") if name == "static" else None
    q, _ = quantize_fp8_reference(x[kept // 8], GRANULARITIES[name], scale=static)
    assert_bits(values, q.view(torch.uint8))


@formats
def test_without_a_map_rows_stay_where_they_are(name):
    """As the intermediate is quantised, whose number of valid rows is the last offset."""
    x = in_poison(spread((300, 360), torch.bfloat16, "cuda"))
    offs = torch.tensor([100, 100, 257], dtype=torch.int32, device="cuda")
    x[257:] = float("nan")
    out = Outputs(name, 300, 360)
    gather(name, x, None, 1, out, num_rows=offs[-1])
    assert_gathered(name, x, out, 257)


@pytest.mark.parametrize("name", GRANULARITIES)
@pytest.mark.parametrize("hidden", [64, 88, 136, 1024, 2048, 8192, 14336, 32768])
@programmatic
def test_in_place(name, hidden, programmatic):
    """Values take the place of their row, and scales lie behind them."""
    for rows, valid in ((1, 1), (8, 7), (1000, 999), (40, 0)):
        x = spread((rows, hidden), torch.bfloat16, "cuda")
        source, tail = x.clone(), -(-hidden // 16) * 16 // 4
        out, of_rows = Outputs.__new__(Outputs), x.view(torch.float32)[:, tail:]
        out.values = x.view(torch.uint8).view(FP8)[:, :hidden]
        scales = {"row": of_rows[:, 0], "1x128": of_rows[:, : -(-hidden // 128)]}
        out.scale = scales.get(name)
        gather(name, x, None, 1, out, num_rows=valid, programmatic=programmatic)
        static = torch.full((), STATIC_SCALE, device="cuda") if name == "static" else None
        q, scale = quantize_fp8_reference(source[:valid], GRANULARITIES[name], scale=static)
        assert_bits(out.values[:valid], q)
        assert_bits(x[valid:], source[valid:])
        if name in scales:
            assert_bits(out.scale[:valid], scale)


def test_what_cannot_be_done_in_place():
    x = torch.zeros(4, 64, device="cuda").bfloat16()
    out = Outputs.__new__(Outputs)
    out.values, out.scale = x, None
    with pytest.raises(ValueError, match="a copy must not have the place of its source"):
        gather("bf16", x, None, 1, out)
    out.values = x.view(torch.uint8).view(FP8)[:, :64]
    slots = torch.zeros(4, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="rows in the place of others must be where those are"):
        gather("static", x, slots, 1, out)


@formats
def test_nan_and_infinity(name):
    if name == "bf16":
        pytest.skip("copies")
    x = spread((16, 264), torch.bfloat16, "cuda")
    x[3, 5], x[7, 130], x[8, 1] = float("nan"), float("inf"), -float("inf")
    row_slot = torch.arange(16, dtype=torch.int32, device="cuda")
    out = Outputs(name, 16, 264)
    gather(name, x, row_slot, 1, out)
    assert_gathered(name, x, out, 16)


@formats
@programmatic
def test_replays(name, programmatic):
    """Rows, map and count change between replays; the call waits for what writes them."""
    x = spread((50, 512), torch.bfloat16, "cuda")
    row_slot, count = slots_of(200, 50, 4), torch.tensor([200], dtype=torch.int32, device="cuda")
    out = Outputs(name, 200, 512)
    sources = [x.clone(), row_slot.clone(), count.clone()]

    def call():
        for target, source in zip((x, row_slot, count), sources, strict=True):
            torch.mul(source, 1, out=target)  # a kernel, whose end the call has to wait for
        gather(name, x, row_slot, 4, out, num_rows=count, programmatic=programmatic)

    _library.load()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for step in range(30):
        valid = (37 * step) % 201
        sources[0].normal_(std=1 + step)
        sources[1].copy_(torch.randint(0, 200, (200,), dtype=torch.int32))
        sources[2].fill_(valid)
        fresh = Outputs(name, 200, 512)
        out.store.copy_(fresh.store)
        if out.scale is not None:
            out.scale.copy_(fresh.scale)
        graph.replay()
        assert_gathered(name, sources[0][sources[1].long() // 4], out, valid)


def test_more_than_2_31_values():
    rows, hidden = 2**19 + 3, 4096
    x = spread((1, hidden), torch.bfloat16, "cuda")
    row_slot = torch.zeros(rows, dtype=torch.int32, device="cuda")
    out = Outputs("1x128", rows, hidden)
    gather("1x128", x, row_slot, 1, out)
    q, scale = quantize_fp8_reference(x, "1x128")
    assert_bits(out.values[-300:], q.expand(300, hidden).contiguous())
    assert_bits(out.scale[-300:], scale.expand(300, -1).contiguous())


ERRORS = {
    "x_dtype": ({"x": lambda: torch.zeros(4, 64, device="cuda")}, "`x` must have dtype BFloat16"),
    "columns": (
        {"x": lambda: torch.zeros(4, 72, device="cuda").bfloat16()},
        "`out` must have size 72",
    ),
    "rows_of_slots": (
        {"row_slot": lambda: torch.zeros(9, dtype=torch.int32, device="cuda")},
        "`row_slot` must have size 8 in dimension 0, got 9",
    ),
    "slots_dtype": (
        {"row_slot": lambda: torch.zeros(8, dtype=torch.int64, device="cuda")},
        "`row_slot` must have dtype Int, got Long",
    ),
    "no_scale": ({"scale": lambda: None}, "`scale` must be given for this `format`, got none"),
    "scale_shape": (
        {"scale": lambda: torch.zeros(7, device="cuda")},
        "`scale` must have size 8 in dimension 0, got 7",
    ),
    "format": ({"format": lambda: 4}, r"`format` must be in \[0, 3\], got 4"),
    "top_k": ({"top_k": lambda: 0}, "`top_k` must be at least 1"),
    "weights": (
        {"topk_weights": lambda: torch.zeros(4, 3, device="cuda")},
        "`topk_weights` must have size 2 in dimension 1, got 3",
    ),
    "static_scale": (
        {"static_scale": lambda: torch.ones((), device="cuda")},
        "`static_scale` must be absent for this `format`, got a tensor",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    _library.load()
    changes, message = ERRORS[name]
    arguments = {
        "x": torch.zeros(4, 64, device="cuda").bfloat16(),
        "row_slot": torch.zeros(8, dtype=torch.int32, device="cuda"),
        "num_rows": None,
        "topk_weights": None,
        "out": torch.zeros(8, 64, device="cuda").to(FP8),
        "scale": torch.zeros(8, device="cuda"),
        "static_scale": None,
        "top_k": 2,
        "format": FORMATS["row"],
        "programmatic": False,
    } | {argument: make() for argument, make in changes.items()}
    with pytest.raises(ValueError, match="^gather_quantize: " + message):
        torch.ops.moe_ext.gather_quantize_configured(**arguments)
