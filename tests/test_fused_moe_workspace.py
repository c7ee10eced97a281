"""Scratch memory of a layer: within the bound, and parts in use at the same time lie apart."""

from __future__ import annotations

import itertools
import re

import moe_ext
import pytest
import torch
from moe_ext._fused_moe_workspace import ALIGNMENT, workspace_layout
from support.fused_moe import Sizes, random_layer

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies  # noqa: E402

ARGUMENTS = {
    "num_tokens": 64,
    "top_k": 8,
    "hidden_size": 2048,
    "intermediate_size": 768,
    "num_experts": 128,
}
sizes = {
    "slots": strategies.integers(1, 2**22),
    "hidden": strategies.integers(1, 2048).map(lambda size: 8 * size),
    "inner": strategies.integers(1, 4096).map(lambda size: 8 * size),
    "experts": strategies.integers(1, 4096),
}


def up(size):
    return -(-size // 16) * 16


def parts_of(slots, hidden, inner, experts, fp8):
    """Begin and end of each part."""
    layout = workspace_layout(slots, hidden, inner, experts, fp8)
    sizes = {
        "offs": 4 * experts,
        "listed": 16 * min(slots, 128),
        "row_slot": 4 * slots,
        "slot_row": 4 * slots,
        "gathered": slots * (up(hidden) if fp8 else 2 * hidden),
        "gathered_scale": slots * 4 * -(-hidden // 128) if fp8 else 0,
        "intermediate": 2 * slots * inner,
        "rows": 2 * slots * hidden,
    }
    if fp8:
        last = slots - 1
        sizes["quantised"] = last * layout.quantised_row_bytes + inner
        row = 4 * -(-inner // 128)
        sizes["quantised_scale"] = last * layout.quantised_scale_row_bytes + row
    places = {name: getattr(layout, name) for name in sizes}
    return layout, {name: (places[name], places[name] + sizes[name]) for name in sizes}


def assert_apart(parts, names):
    places = sorted(parts[name] for name in names)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))


ALWAYS = ("offs", "listed", "row_slot", "slot_row")


@hypothesis.settings(deadline=None)
@hypothesis.given(**sizes, fp8=strategies.booleans())
@hypothesis.example(slots=16384, hidden=4096, inner=14336, experts=8, fp8=True)
@hypothesis.example(slots=2**22, hidden=8, inner=24, experts=8, fp8=True)
@hypothesis.example(slots=2**22, hidden=8, inner=8, experts=8, fp8=True)
def test_parts(slots, hidden, inner, experts, fp8):
    layout, parts = parts_of(slots, hidden, inner, experts, fp8)
    assert all(end <= layout.total for _, end in parts.values())
    assert all(parts[name][0] % ALIGNMENT == 0 for name in ALWAYS)
    assert all(getattr(layout, name) % ALIGNMENT == 0 for name in ("gathered", "rows"))
    assert layout.intermediate % ALIGNMENT == layout.quantised % ALIGNMENT == 0
    if not fp8:
        assert_apart(parts, (*ALWAYS, "gathered", "intermediate"))
        assert_apart(parts, (*ALWAYS, "intermediate", "rows"))
        return
    assert_apart(parts, (*ALWAYS, "gathered", "gathered_scale", "intermediate"))
    assert layout.quantised_row_bytes % 16 == 0
    assert layout.quantised_scale % 4 == layout.quantised_scale_row_bytes % 4 == 0
    if layout.in_place:
        # A row of scales follows its row of values, both in the place of the row in BF16.
        assert layout.quantised == layout.intermediate
        assert layout.quantised_row_bytes == layout.quantised_scale_row_bytes == 2 * inner
        assert layout.quantised_scale - layout.quantised >= inner
        assert layout.quantised_scale - layout.quantised + 4 * -(-inner // 128) <= 2 * inner
        assert_apart(parts, (*ALWAYS, "intermediate", "rows"))
    else:
        assert_apart(parts, (*ALWAYS, "intermediate", "quantised", "quantised_scale"))
        assert_apart(parts, (*ALWAYS, "rows", "quantised", "quantised_scale"))


@hypothesis.settings(deadline=None)
@hypothesis.given(**sizes)
def test_the_bound_of_memory(slots, hidden, inner, experts):
    size = moe_ext.fused_moe_workspace_size(
        num_tokens=slots, top_k=1, hidden_size=hidden, intermediate_size=inner, num_experts=experts
    )
    assert size <= slots * ((inner + hidden) * 2 + 16) + 4 * 2**20
    fewer = moe_ext.fused_moe_workspace_size(
        num_tokens=slots - 1,
        top_k=1,
        hidden_size=hidden,
        intermediate_size=inner,
        num_experts=experts,
    )
    assert fewer <= size


def test_no_tokens():
    assert moe_ext.fused_moe_workspace_size(**ARGUMENTS | {"num_tokens": 0}) < 2**20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": -1}, "`num_tokens` must be 0 to 4194304, got -1"),
        ({"top_k": 33}, "`top_k` must be 1 to 32, got 33"),
        ({"hidden_size": -8}, "`hidden_size` must be 0 to 2147483647, got -8"),
        ({"num_experts": 0}, "`num_experts` must be 1 to 4096, got 0"),
        ({"num_tokens": 16.0}, "`num_tokens` must be an int, got float"),
        ({"num_tokens": torch.tensor(16)}, "`num_tokens` must be an int, got Tensor"),
        ({"num_tokens": None}, "`num_tokens` must be an int, got NoneType"),
        ({"top_k": True}, "`top_k` must be an int, got bool"),
        ({"hidden_size": 64.5}, "`hidden_size` must be an int, got float"),
        ({"intermediate_size": 64.0}, "`intermediate_size` must be an int, got float"),
        ({"num_experts": "8"}, "`num_experts` must be an int, got str"),
        (
            {"num_tokens": 2**20},
            "`num_tokens` times `top_k` must be at most 4194304, got 8388608",
        ),
    ],
)
def test_errors(changes, message):
    with pytest.raises(ValueError, match=re.escape(f"fused_moe_workspace_size: {message}")):
        moe_ext.fused_moe_workspace_size(**ARGUMENTS | changes)


def test_sizes_of_symbols():
    @torch.compile(backend="eager", dynamic=True, fullgraph=True)
    def size(x):
        return moe_ext.fused_moe_workspace_size(**ARGUMENTS | {"num_tokens": x.shape[0]})

    for num_tokens in (3, 5):
        expected = moe_ext.fused_moe_workspace_size(**ARGUMENTS | {"num_tokens": num_tokens})
        assert size(torch.ones(num_tokens, 2)) == expected


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64])
@pytest.mark.parametrize("shift", [0, 8, 248])
def test_any_dtype_and_address(dtype, shift):
    layer = random_layer("bf16", "swiglu", Sizes())
    size = moe_ext.fused_moe_workspace_size(
        num_tokens=9, top_k=3, hidden_size=192, intermediate_size=96, num_experts=5
    )
    memory = torch.zeros((size + 512) // dtype.itemsize, dtype=dtype)
    workspace = memory[shift // dtype.itemsize :][: -(-size // dtype.itemsize)]
    moe_ext.fused_moe(**layer, workspace=workspace)
    with pytest.raises(ValueError, match=f"`workspace` must have at least {size} bytes"):
        moe_ext.fused_moe(**layer, workspace=workspace[:-1])
