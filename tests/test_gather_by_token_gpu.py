"""Tokens read once for all of their rows: bit for bit what gathering row by row gives."""

from __future__ import annotations

import pytest
import torch
from moe_ext import _library
from moe_ext.reference import quantize_fp8_reference
from support.gather import FORMATS, Outputs, gather
from support.inputs import in_poison, poisoned
from support.quantize import FP8, assert_bits, spread
from support.tolerance import assert_untouched

pytestmark = pytest.mark.gpu

HIDDEN = (8, 64, 88, 128, 136, 264, 512, 520, 2048, 2880, 7168, 8200, 16392, 33000)
NONE = -1

formats = pytest.mark.parametrize("name", FORMATS)
programmatic = pytest.mark.parametrize("programmatic", [False, True])


def maps_of(num_tokens, top_k, max_rows, kept, seed=7):
    """`kept` slots get a row, all of them different; and the same the other way round."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_tokens * top_k, generator=generator)[:kept].int()
    rows = torch.randperm(max_rows, generator=generator)[:kept].int()
    slot_row = torch.full((num_tokens * top_k,), NONE, dtype=torch.int32)
    row_slot = torch.full((max_rows,), NONE, dtype=torch.int32)
    slot_row[slots.long()] = rows
    row_slot[rows.long()] = slots
    return slot_row.cuda(), row_slot.cuda()


def assert_same(out, expected):
    """Rows, scales and all that lies around them."""
    assert_bits(out.store, expected.store)
    if expected.scale is not None:
        assert_bits(out.scale, expected.scale)


def check(name, num_tokens, top_k, hidden, max_rows, kept, programmatic=False):
    x = in_poison(spread((num_tokens, hidden), torch.bfloat16, "cuda"))
    slot_row, row_slot = maps_of(num_tokens, top_k, max_rows, kept)
    out, expected = Outputs(name, max_rows, hidden), Outputs(name, max_rows, hidden)
    gather(name, x, row_slot, top_k, expected)
    gather(name, x, None, top_k, out, slot_row=slot_row, programmatic=programmatic)
    assert_same(out, expected)


@formats
@pytest.mark.parametrize("hidden", HIDDEN)
def test_sizes(name, hidden):
    for num_tokens, top_k, max_rows, kept in (
        (1, 1, 1, 1),
        (1, 8, 8, 8),
        (1, 8, 8, 3),
        (5, 8, 40, 40),
        (5, 8, 30, 23),
        (38, 8, 304, 300),
        (38, 8, 400, 9),
    ):
        check(name, num_tokens, top_k, hidden, max_rows, kept)


@formats
@pytest.mark.parametrize("top_k", range(1, 33))
def test_choices(name, top_k):
    for num_tokens, hidden in ((1, 2048), (7, 264), (40, 1032), (300, 2056)):
        slots = num_tokens * top_k
        check(name, num_tokens, top_k, hidden, slots, slots)
        check(name, num_tokens, top_k, hidden, slots, slots // 3)


@formats
@pytest.mark.parametrize("hidden", [136, 2048, 2888, 7168])
@programmatic
def test_many_tokens(name, hidden, programmatic):
    """So many that loads wait for the rows, and fewer; most slots dropped, and none."""
    for num_tokens in (700, 2500):
        slots = num_tokens * 4
        for kept in (slots, slots - 1, slots // 10, 17):
            check(name, num_tokens, 4, hidden, slots, kept, programmatic)


@formats
@pytest.mark.parametrize(
    ("num_tokens", "hidden"), [(1, 7168), (40, 256), (300, 2048), (2500, 2048)]
)
def test_no_slot_with_a_row(name, num_tokens, hidden):
    x = poisoned((num_tokens, hidden), torch.bfloat16, "cuda")
    out = Outputs(name, 2 * num_tokens, hidden)
    slot_row = torch.full((2 * num_tokens,), NONE, dtype=torch.int32, device="cuda")
    gather(name, x, None, 2, out, slot_row=slot_row)
    assert_untouched(out.store)
    if out.scale is not None:
        assert_untouched(out.scale)


@formats
@pytest.mark.parametrize(("num_tokens", "hidden"), [(4, 256), (2500, 2048)])
def test_tokens_without_rows_do_not_count(name, num_tokens, hidden):
    x = spread((num_tokens, hidden), torch.bfloat16, "cuda")
    slot_row, row_slot = maps_of(num_tokens, 2, 2 * num_tokens, num_tokens)
    dropped = torch.arange(num_tokens, device="cuda") % 3 == 0
    slot_row.view(-1, 2)[dropped] = NONE
    row_slot[dropped[row_slot.long() // 2]] = NONE
    x[dropped] = float("inf")
    out, expected = (Outputs(name, 2 * num_tokens, hidden) for _ in range(2))
    gather(name, x, row_slot, 2, expected)
    gather(name, x, None, 2, out, slot_row=slot_row)
    assert_same(out, expected)


@formats
def test_numbers_that_are_no_rows_are_left_out(name):
    """Memory safety whatever the map holds."""
    x = spread((4, 256), torch.bfloat16, "cuda")
    slot_row, row_slot = maps_of(4, 8, 32, 32)
    bad = torch.tensor([-1, 32, 2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    row_slot[slot_row[4:8].long()] = NONE
    slot_row[4:8] = bad
    out, expected = Outputs(name, 32, 256), Outputs(name, 32, 256)
    gather(name, x, row_slot, 8, expected)
    gather(name, x, None, 8, out, slot_row=slot_row)
    assert_same(out, expected)


@formats
def test_a_row_of_two_slots_of_a_token(name):
    x = spread((3, 264), torch.bfloat16, "cuda")
    slot_row = torch.tensor([5, 5, 0, 1, 2, 2], dtype=torch.int32, device="cuda")
    row_slot = torch.tensor([2, 3, 4, -1, -1, 0], dtype=torch.int32, device="cuda")
    out, expected = Outputs(name, 6, 264), Outputs(name, 6, 264)
    gather(name, x, row_slot, 2, expected)
    gather(name, x, None, 2, out, slot_row=slot_row)
    assert_same(out, expected)


@formats
def test_with_weights_rows_stay_by_row(name):
    x = spread((30, 264), torch.bfloat16, "cuda")
    weights = torch.randn(30, 4, device="cuda")
    slot_row, row_slot = maps_of(30, 4, 120, 100)
    out, expected = Outputs(name, 120, 264), Outputs(name, 120, 264)
    gather(name, x, row_slot, 4, expected, weights=weights)
    gather(name, x, row_slot, 4, out, weights=weights, slot_row=slot_row)
    assert_same(out, expected)


@formats
def test_nan_and_infinity(name):
    x = spread((16, 264), torch.bfloat16, "cuda")
    x[3, 5], x[7, 130], x[8, 1] = float("nan"), float("inf"), -float("inf")
    slot_row, row_slot = maps_of(16, 2, 32, 32)
    out, expected = Outputs(name, 32, 264), Outputs(name, 32, 264)
    gather(name, x, row_slot, 2, expected)
    gather(name, x, None, 2, out, slot_row=slot_row)
    assert_same(out, expected)


@formats
@programmatic
@pytest.mark.parametrize("num_tokens", [50, 2500])
def test_replays(name, programmatic, num_tokens):
    """Values and map change between replays; the call waits for what writes them."""
    slots, hidden = num_tokens * 4, 1032
    x = spread((num_tokens, hidden), torch.bfloat16, "cuda")
    slot_row, _ = maps_of(num_tokens, 4, slots, slots)
    out = Outputs(name, slots, hidden)
    sources = [x.clone(), slot_row.clone()]

    def call():
        for target, source in zip((x, slot_row), sources, strict=True):
            torch.mul(source, 1, out=target)  # a kernel, whose end the call has to wait for
        gather(name, x, None, 4, out, slot_row=slot_row, programmatic=programmatic)

    _library.load()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for step in range(10):
        sources[0].normal_(std=1 + step)
        new_map, row_slot = maps_of(num_tokens, 4, slots, (37 * step * step) % slots, seed=step)
        sources[1].copy_(new_map)
        fresh, expected = Outputs(name, slots, hidden), Outputs(name, slots, hidden)
        out.store.copy_(fresh.store)
        if out.scale is not None:
            out.scale.copy_(fresh.scale)
        graph.replay()
        gather(name, sources[0], row_slot, 4, expected)
        assert_same(out, expected)


def test_more_than_2_31_values():
    rows, hidden = 2**19 + 3, 4096
    x = spread((2, hidden), torch.bfloat16, "cuda")
    slot_row = torch.tensor([rows - 1, 0, 1, rows - 2], dtype=torch.int32, device="cuda")
    out = Outputs("1x128", rows, hidden)
    gather("1x128", x, None, 2, out, slot_row=slot_row)
    q, scale = quantize_fp8_reference(x, "1x128")
    assert_bits(out.values[[0, 1, -2, -1]], q[[0, 1, 1, 0]])
    assert_bits(out.scale[[0, 1, -2, -1]], scale[[0, 1, 1, 0]])


ERRORS = {
    "slots": (
        {"slot_row": lambda: torch.zeros(9, dtype=torch.int32, device="cuda")},
        "`slot_row` must have size 8 in dimension 0, got 9",
    ),
    "dtype": (
        {"slot_row": lambda: torch.zeros(8, dtype=torch.int64, device="cuda")},
        "`slot_row` must have dtype Int, got Long",
    ),
    "strides": (
        {"slot_row": lambda: torch.zeros(16, dtype=torch.int32, device="cuda")[::2]},
        "`slot_row` must be contiguous",
    ),
    "top_k": ({"top_k": lambda: 33}, "`top_k` must be at most 32 with `slot_row`, got 33"),
    "weights": (
        {"topk_weights": lambda: torch.zeros(4, 2, device="cuda")},
        "`top_k` must be at least 1, and 1 if neither",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    _library.load()
    changes, message = ERRORS[name]
    arguments = {
        "x": torch.zeros(4, 64, device="cuda").bfloat16(),
        "row_slot": None,
        "num_rows": None,
        "topk_weights": None,
        "out": torch.zeros(8, 64, device="cuda").to(FP8),
        "scale": torch.zeros(8, device="cuda"),
        "static_scale": None,
        "top_k": 2,
        "format": FORMATS["row"],
        "programmatic": False,
        "slot_row": torch.zeros(8, dtype=torch.int32, device="cuda"),
    } | {argument: make() for argument, make in changes.items()}
    with pytest.raises(ValueError, match="^gather_quantize: " + message):
        torch.ops.moe_ext.gather_quantize_configured(**arguments)
