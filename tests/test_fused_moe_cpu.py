"""What `fused_moe` promises, on the CPU: activations, layouts and options against a plain loop."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext.reference import fused_moe_reference
from support.fused_moe import (
    ACTIVATIONS,
    GATED,
    LAYOUTS,
    Sizes,
    assert_layer_is_right,
    integer_layer,
    is_gated,
    plain_layer,
    random_layer,
)
from support.tolerance import assert_close_to_reference, assert_same_bits

from bench.layer_reference import layer_by_parts

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies  # noqa: E402

activations = pytest.mark.parametrize("activation", ACTIVATIONS)
layouts = pytest.mark.parametrize("layout", LAYOUTS)

SIZES = {
    "small": Sizes(),
    "one_token": Sizes(num_tokens=1),
    "I_176_H_320": Sizes(hidden=320, intermediate=176),
    "I_192": Sizes(intermediate=192),
    "I_360": Sizes(hidden=64, intermediate=360),
    "top_1": Sizes(top_k=1),
    "all_experts": Sizes(num_experts=4, top_k=4),
    "one_expert": Sizes(num_experts=1, top_k=1),
}


def check(layer):
    out = moe_ext.fused_moe(**layer)
    assert out.dtype is torch.bfloat16
    assert_close_to_reference(out, plain_layer(layer))


def options_of(name, sizes, activation):
    """An option of the layer by name."""
    hidden, n = sizes.hidden, (2 if is_gated(activation) else 1) * sizes.intermediate
    return {
        "none": {},
        "biases": {
            "w13_bias": torch.randn(sizes.num_experts, n).bfloat16(),
            "w2_bias": torch.randn(sizes.num_experts, hidden),
        },
        "on_input": {"apply_router_weight_on_input": True},
        "addend_and_scale": {
            "addend": torch.randn(sizes.num_tokens, hidden).bfloat16(),
            "routed_scale": 2.5,
        },
        "float32_addend": {"addend": torch.randn(sizes.num_tokens, hidden)},
        "first_expert": {"first_expert": 2},
        "expert_map": {"expert_map": torch.tensor([3, -1, 0, 9, 4], dtype=torch.int32)},
        "batch_invariant": {"batch_invariant": True},
    }[name]


OPTIONS = (
    "none",
    "biases",
    "on_input",
    "addend_and_scale",
    "float32_addend",
    "first_expert",
    "expert_map",
    "batch_invariant",
)


@layouts
@activations
def test_activations(layout, activation):
    check(random_layer(layout, activation, Sizes()))


@layouts
@pytest.mark.parametrize("name", SIZES)
def test_sizes(layout, name):
    check(random_layer(layout, "swiglu", SIZES[name]))


@layouts
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_options(layout, name, activation):
    layer = random_layer(layout, activation, Sizes())
    check(layer | options_of(name, Sizes(), activation))


@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("layout", ["bf16", "channel", "block"])
def test_interleaved(layout, activation):
    layer = random_layer(layout, activation, Sizes()) | {"gate_up_layout": "interleaved"}
    check(layer | options_of("biases", Sizes(), activation))


def test_interleaved_is_the_concatenated_layer_with_its_rows_in_another_order():
    layer = random_layer("bf16", "swiglu", Sizes())
    gate, up = layer["w13"].chunk(2, dim=1)
    w13 = torch.stack([gate, up], dim=2).flatten(1, 2)
    out = moe_ext.fused_moe(**layer | {"w13": w13, "gate_up_layout": "interleaved"})
    assert_close_to_reference(out, moe_ext.fused_moe(**layer).float())


@pytest.mark.parametrize("limit", [float("inf"), 1e39, 1e300])
def test_a_limit_that_no_float32_reaches_is_none(limit):
    layer = random_layer("bf16", "swiglu", Sizes())
    assert torch.equal(moe_ext.fused_moe(**layer, limit=limit), moe_ext.fused_moe(**layer))


@pytest.mark.parametrize(
    ("activation", "options"),
    [
        ("swiglu", {"limit": 0.5}),
        ("swiglu", {"limit": 10.0}),
        ("swiglu_oai", {"limit": 0.5, "alpha": 3.0}),
        ("swiglu_oai", {"alpha": 1.0}),
    ],
)
def test_alpha_and_limit(activation, options):
    layer = random_layer("bf16", activation, Sizes()) | options
    check(layer)
    if options.get("limit") == 0.5:
        plain = moe_ext.fused_moe(**random_layer("bf16", activation, Sizes()))
        assert not torch.equal(moe_ext.fused_moe(**layer), plain)


def test_what_the_clamp_does_to_both_signs():
    """The gate from above alone, up from both sides: DeepSeek-V4 and gpt-oss alike."""
    bias = torch.tensor([[5.0, -5.0, 5.0, -5.0, 0, 0, 0, 0, 3.0, 3.0, -3.0, -3.0, 0, 0, 0, 0]])
    layer = {
        "hidden_states": torch.zeros(1, 8).bfloat16(),
        "w13": torch.zeros(1, 16, 8).bfloat16(),
        "w2": torch.eye(8)[None].bfloat16(),
        "topk_weights": torch.ones(1, 1),
        "topk_ids": torch.zeros(1, 1, dtype=torch.int32),
        "w13_bias": bias,
        "limit": 2.0,
    }
    gate, up = torch.tensor([2.0, -5.0, 2.0, -5.0]), torch.tensor([2.0, 2.0, -2.0, -2.0])
    out = moe_ext.fused_moe(**layer)[0, :4]
    assert torch.equal(out, (gate * gate.sigmoid() * up).bfloat16())
    out = moe_ext.fused_moe(**layer, activation="swiglu_oai", alpha=0.5)[0, :4]
    assert torch.equal(out, (gate * (0.5 * gate).sigmoid() * (up + 1)).bfloat16())


@layouts
@pytest.mark.parametrize("intermediate", [96, 192, 176, 360])
def test_integers_are_exact(layout, intermediate):
    sizes = Sizes(num_tokens=17, hidden=256, intermediate=intermediate)
    layer = integer_layer(layout, sizes)
    expected = plain_layer(layer)
    assert_same_bits(moe_ext.fused_moe(**layer), expected.bfloat16())
    assert expected.abs().max() > 0


@pytest.mark.parametrize("layout", ["tensor", "expert"])
def test_static_scales(layout):
    layer = random_layer(layout, "swiglu", Sizes())
    for shape in ((), (1,)):
        check(layer | {"a1_scale": torch.full(shape, 0.02), "a2_scale": torch.full(shape, 0.03)})
    check(layer | {"a2_scale": torch.tensor(0.001)})  # saturates


@pytest.mark.parametrize("first", LAYOUTS[1:])
@pytest.mark.parametrize("second", LAYOUTS[1:-1])
def test_stages_with_different_layouts(first, second):
    layer, other = (random_layer(name, "swiglu", Sizes()) for name in (first, second))
    check(layer | {"w2": other["w2"], "w2_scale": other["w2_scale"]})


@layouts
@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
def test_a_token_has_no_part_in_the_scales_of_others(layout, value):
    layer = random_layer(layout, "swiglu", Sizes())
    expected = moe_ext.fused_moe(**layer)
    layer["hidden_states"][4] = value
    others = torch.arange(9) != 4
    assert_same_bits(moe_ext.fused_moe(**layer)[others], expected[others])


@layouts
def test_nan_of_a_token_without_an_expert_here_stays_out(layout):
    layer = random_layer(layout, "swiglu", Sizes())
    layer["topk_ids"][4] = -1
    expected = moe_ext.fused_moe(**layer)
    layer["hidden_states"][4], layer["topk_weights"][4] = float("nan"), float("nan")
    out = moe_ext.fused_moe(**layer)
    assert_same_bits(out, expected)
    assert out[4].eq(0).all()


@layouts
def test_zero_tokens(layout):
    layer = random_layer(layout, "swiglu", Sizes(num_tokens=0))
    out = moe_ext.fused_moe(**layer)
    assert (out.shape, out.dtype) == ((0, 192), torch.bfloat16)


@layouts
def test_no_expert_here_gives_the_addend(layout):
    layer = random_layer(layout, "swiglu", Sizes())
    layer["topk_ids"] += 100
    assert moe_ext.fused_moe(**layer).eq(0).all()
    addend = torch.randn(9, 192).bfloat16()
    assert_same_bits(moe_ext.fused_moe(**layer, addend=addend), addend)


def test_routing_dtypes():
    layer = random_layer("bf16", "swiglu", Sizes())
    expected = moe_ext.fused_moe(**layer)
    assert_same_bits(moe_ext.fused_moe(**layer | {"topk_ids": layer["topk_ids"].int()}), expected)
    check(layer | {"topk_weights": layer["topk_weights"].bfloat16()})


def test_shards_are_views():
    """Half of the intermediate of a larger layer, as tensor parallelism cuts it."""
    layer = random_layer("bf16", "relu2", Sizes(intermediate=192))
    halves = [
        layer | {"w13": layer["w13"][:, part], "w2": layer["w2"][:, :, part]}
        for part in (slice(0, 96), slice(96, 192))
    ]
    for half in halves:
        check(half)
    total = sum(fused_moe_reference(**half, out_dtype=torch.float32) for half in halves)
    assert_close_to_reference(total, plain_layer(layer))


def test_parts_of_the_experts_sum_to_the_layer():
    """Expert parallelism by ranges and by a map."""
    layer = random_layer("bf16", "swiglu", Sizes(num_experts=6))
    whole, by_range, by_map = plain_layer(layer), 0, 0
    for rank in range(3):
        mine = slice(2 * rank, 2 * rank + 2)
        part = layer | {"w13": layer["w13"][mine], "w2": layer["w2"][mine]}
        by_range += moe_ext.fused_moe(**part, first_expert=2 * rank).float()
        table = torch.full((6,), -1, dtype=torch.int32)
        table[mine] = torch.arange(2, dtype=torch.int32)
        by_map += moe_ext.fused_moe(**part, expert_map=table).float()
    assert_same_bits(by_range, by_map)
    assert (by_range - whole).abs().max() < 0.02 * whole.abs().max()


def test_out_and_workspace_are_used():
    layer = random_layer("block", "swiglu", Sizes())
    expected = moe_ext.fused_moe(**layer)
    out = torch.full((9, 192 + 16), float("nan")).bfloat16()[:, :192]
    size = moe_ext.fused_moe_workspace_size(
        num_tokens=9, top_k=3, hidden_size=192, intermediate_size=96, num_experts=5
    )
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8)
    moe_ext.fused_moe_out(**layer, out=out, workspace=workspace)
    assert_same_bits(out, expected)
    assert_same_bits(moe_ext.fused_moe(**layer, workspace=workspace), expected)


EXTREME_IDS = [-(2**63), -(2**31), -1, 0, 1, 2, 3, 4, 5, 6, 7, 2**31, 2**63 - 1]


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    ids=strategies.lists(
        strategies.lists(strategies.sampled_from(EXTREME_IDS), min_size=3, max_size=3), max_size=9
    ),
    first=strategies.integers(0, 3),
    table=strategies.none() | strategies.lists(strategies.integers(-2, 6), min_size=1, max_size=8),
)
def test_any_ids(ids, first, table):
    """Duplicates, sentinels and garbage; integers, so every bit counts."""
    layer = integer_layer("bf16", Sizes(num_tokens=len(ids), hidden=16, intermediate=8))
    layer["topk_ids"] = torch.tensor(ids, dtype=torch.int64).reshape(-1, 3)
    if table is None:
        layer["first_expert"] = first
    else:
        layer["expert_map"] = torch.tensor(table, dtype=torch.int32)
    assert_same_bits(moe_ext.fused_moe(**layer), plain_layer(layer).bfloat16())


def test_many_experts_and_many_slots():
    sizes = Sizes(num_tokens=5, num_experts=1025, hidden=8, intermediate=8)
    check(random_layer("bf16", "swiglu", sizes))
    layer = random_layer("bf16", "swiglu", Sizes(num_tokens=1, num_experts=2, hidden=8, top_k=1))
    many = layer | {
        name: layer[name].expand(70_000, -1).contiguous()
        for name in ("hidden_states", "topk_weights", "topk_ids")
    }
    out = moe_ext.fused_moe(**many)
    assert (out == out[0]).all()


def test_routing_with_strides():
    layer = random_layer("bf16", "swiglu", Sizes())
    expected = moe_ext.fused_moe(**layer)
    weights = torch.stack([layer["topk_weights"].T] * 2)[1].T
    ids = torch.cat([layer["topk_ids"], torch.full((9, 2), -7)], dim=1)[:, :3]
    assert not weights.is_contiguous()
    assert not ids.is_contiguous()
    out = moe_ext.fused_moe(**layer | {"topk_weights": weights, "topk_ids": ids})
    assert_same_bits(out, expected)


@layouts
def test_by_parts_the_reference_is_the_same(layout):
    layer = random_layer(layout, "swiglu", Sizes(intermediate=176)) | {"routed_scale": 2.0}
    assert_same_bits(layer_by_parts(**layer), fused_moe_reference(**layer))


@layouts
@pytest.mark.parametrize("wrong", [{"routed_scale": 1.05}, {"limit": 1.0}])
def test_a_wrong_layer_is_found(layout, wrong):
    layer = random_layer(layout, "swiglu", Sizes())
    assert_layer_is_right(moe_ext.fused_moe(**layer), layer)
    with pytest.raises(AssertionError):
        assert_layer_is_right(moe_ext.fused_moe(**layer | wrong), layer)
