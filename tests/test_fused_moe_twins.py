"""What C++ derives of a layer's sizes and scales for itself is what Python derives of them."""

from __future__ import annotations

import pytest
from moe_ext._configs import planner
from moe_ext._fused_moe_scales import block_shapes, weight_scale_of
from moe_ext._fused_moe_workspace import (
    mixed_workspace_bytes,
    workspace_bytes,
    workspace_layout,
)

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies  # noqa: E402

layers = {
    "slots": strategies.one_of(strategies.integers(1, 300), strategies.integers(1, 2**22)),
    "hidden": strategies.integers(1, 2048).map(lambda size: 8 * size),
    "inner": strategies.integers(1, 4096).map(lambda size: 8 * size),
    "experts": strategies.integers(1, 4096),
}


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(**layers)
@hypothesis.example(slots=16384, hidden=4096, inner=14336, experts=8)
@hypothesis.example(slots=2**22, hidden=8, inner=24, experts=8)
@hypothesis.example(slots=2**22, hidden=2**31 - 8, inner=2**30 - 8, experts=4096)
def test_the_workspace(slots, hidden, inner, experts):
    sizes = (slots, hidden, inner, experts)
    for fp8 in (False, True):
        assert planner().workspace_layout(*sizes, fp8) == workspace_layout(*sizes, fp8)._asdict()
    assert planner().workspace_bytes(*sizes) == workspace_bytes(*sizes)


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(tokens=strategies.integers(1, 2**17), top_k=strategies.integers(1, 32), **layers)
def test_the_workspace_of_a_mixture(tokens, top_k, slots, hidden, inner, experts):
    del slots
    sizes = (tokens, top_k, hidden, inner, experts)
    size = mixed_workspace_bytes(*sizes)
    assert planner().mixed_workspace_bytes(*sizes) == size
    per_token = hidden + 4 * -(-hidden // 128)
    apart = min(tokens * top_k, 512) * (inner + 4 * -(-inner // 128))
    assert size <= tokens * (top_k * ((inner + hidden) * 2 + 16) + per_token) + apart + 2**16
    assert mixed_workspace_bytes(tokens + 1, top_k, hidden, inner, experts) >= size


def shapes_of(experts, n, k):
    """Every layout's shape, and those next to it: other sizes, one dimension more or less."""
    whole, halves = block_shapes(experts, n, k)
    known = [(), (1,), (experts,), (experts, 1), (experts, 1, 1), (experts, n), (experts, n, 1)]
    for shape in (*known, whole, halves):
        yield shape
        yield (*shape, 1)
        yield shape[:-1]
        for dim in range(len(shape)):
            yield (*shape[:dim], shape[dim] + 1, *shape[dim + 1 :])
            yield (*shape[:dim], 0, *shape[dim + 1 :])
    yield (experts, 2 * halves[2], halves[3])
    yield (1,) * 6


@pytest.mark.parametrize("experts", [1, 2, 3, 64])
@pytest.mark.parametrize("n", [8, 16, 128, 136, 256, 272, 1536])
@pytest.mark.parametrize("k", [8, 128, 160, 1024])
def test_scales_of_weights(experts, n, k):
    found = set()
    for shape in shapes_of(experts, n, k):
        expected = weight_scale_of(shape, experts, n, k)
        found.add(expected)
        same = None if expected is None else tuple(expected)
        assert planner().weight_scale_of(shape, experts, n, k) == same
    assert {scale.granularity for scale in found if scale} >= {"tensor", "row"}
    assert None in found
