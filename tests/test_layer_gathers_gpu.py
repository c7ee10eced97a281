"""Kernels that find a layer's tokens where they lie: what they read, and what they must not.

That they give the bits of the others: tests/test_layer_kernels_gpu.py.
"""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext.reference import fused_moe_reference
from support.fused_moe import Sizes, assert_layer_is_right, random_layer
from support.gathering import LAYOUTS, PAIRS, PLAIN_BLOCK, make_layer, narrow_pairs, pairs
from support.graphs import captured
from support.inputs import in_poison
from support.kernels import gathering_kernels
from support.tolerance import assert_same_bits

pytestmark = pytest.mark.gpu

# k tails of 16 bytes and of 8, a step of K and several, tiles with one row and with all.
SIZES = {
    "k_tail": Sizes(150, 6, 3, 400, 128),
    "half_a_chunk": Sizes(150, 6, 3, 392, 128),
    "one_step": Sizes(300, 3, 2, 64, 192),
    "one_token": Sizes(1, 6, 3, 512, 128),
    "one_expert": Sizes(513, 1, 1, 256, 128),
}


@pairs
@pytest.mark.parametrize("name", SIZES)
def test_sizes(layout, config, name, forced):
    layer = make_layer(layout, SIZES[name], "cuda")
    forced(config, layer)
    assert_same_bits(moe_ext.fused_moe(**layer), fused_moe_reference(**layer))


@pairs
def test_nothing_beside_the_rows_counts(layout, config, forced):
    layer = make_layer(layout, SIZES["half_a_chunk"], "cuda")
    expected = fused_moe_reference(**layer)
    layer["hidden_states"] = in_poison(layer["hidden_states"])
    forced(config, layer)
    assert_same_bits(moe_ext.fused_moe(**layer), expected)


@pairs
def test_tokens_without_an_expert_here_do_not_count(layout, config, forced):
    layer = make_layer(layout, SIZES["k_tail"], "cuda")
    layer["topk_ids"][::3] = -1
    layer["topk_ids"][1::3, 1:] = 99
    expected = fused_moe_reference(**layer)
    layer["hidden_states"][::3] = float("nan")
    forced(config, layer)
    assert_same_bits(moe_ext.fused_moe(**layer), expected)


@pairs
def test_no_expert_here_at_all(layout, config, forced):
    layer = make_layer(layout, SIZES["k_tail"], "cuda")
    layer["topk_ids"].fill_(-1)
    layer["hidden_states"].fill_(float("nan"))
    forced(config, layer)
    assert not bool(moe_ext.fused_moe(**layer).any())


@pairs
def test_a_sort_of_several_launches(layout, config, forced):
    # Its scratch lies where quantised tokens go.
    layer = make_layer(layout, Sizes(8500, 16, 8, 192, 192), "cuda")
    forced(config, layer)
    assert_same_bits(moe_ext.fused_moe(**layer), fused_moe_reference(**layer))


@pairs
def test_replays_with_other_tokens_and_routing(layout, config, forced):
    sizes = SIZES["k_tail"]
    layers = [make_layer(layout, sizes, "cuda", seed=seed) for seed in (1, 2, 3)]
    own = layers[0] | {name: layers[0][name].clone() for name in ("hidden_states", "topk_ids")}
    variants = [own | {n: layer[n] for n in ("hidden_states", "topk_ids")} for layer in layers]
    expected = [fused_moe_reference(**variant) for variant in variants]
    out = torch.empty_like(own["hidden_states"])
    forced(config, own)
    # Two in a row: the second may begin while the first still runs.
    graph = captured(lambda: [moe_ext.fused_moe_out(**own, out=out) for _ in range(2)])
    for turn in range(30):
        variant = variants[turn % 3]
        own["hidden_states"].copy_(variant["hidden_states"])
        own["topk_ids"].copy_(variant["topk_ids"])
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, expected[turn % 3])


@pairs
def test_one_token_many_times(layout, config, forced):
    # All rows of all groups are the same row of `hidden_states`, in tiles of every width.
    layer = make_layer(layout, Sizes(257, 3, 3, 256, 128), "cuda")
    layer["hidden_states"][:] = layer["hidden_states"][:1]
    layer["topk_weights"][:] = layer["topk_weights"][:1]
    layer["topk_ids"][:] = torch.arange(3, device="cuda")
    forced(config, layer)
    out = moe_ext.fused_moe(**layer)
    assert_same_bits(out, out[:1].expand_as(out))
    assert not bool(out.isnan().any())


@narrow_pairs
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(1, 1, 1, 256, 128),
        Sizes(1, 300, 8, 272, 128),
        Sizes(4, 128, 8, 256, 128),
        Sizes(8, 5, 4, 256, 64),
        Sizes(11, 7, 3, 192, 64),
        Sizes(32, 3, 1, 256, 128),
        Sizes(1, 1024, 32, 256, 128),
    ],
    ids=lambda sizes: f"{sizes.num_tokens}x{sizes.top_k}of{sizes.num_experts}",
)
def test_few_rows(layout, config, sizes, forced):
    layer = make_layer(layout, sizes, "cuda")
    forced(config, layer)
    expected = fused_moe_reference(**layer)
    assert_same_bits(moe_ext.fused_moe(**layer), expected)
    layer["topk_ids"] = layer["topk_ids"].to(torch.int64)
    assert_same_bits(moe_ext.fused_moe(**layer), expected)


@narrow_pairs
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_few_rows_of_which_some_have_no_expert_here(layout, config, dtype, forced):
    layer = make_layer(layout, Sizes(8, 6, 4, 256, 128), "cuda")
    strange = [-1, 6, 7, -(2**31), 2**31 - 1]
    if dtype == torch.int64:
        strange += [2**32, 2**32 + 3, -(2**63), 2**63 - 1, -(2**32)]
    ids = layer["topk_ids"].to(dtype)
    for i, value in enumerate(strange):
        ids[i % 8, i % 4] = value
    ids[7] = ids[7, 0]  # and one token with one expert only
    layer["topk_ids"] = ids
    forced(config, layer)
    assert_same_bits(moe_ext.fused_moe(**layer), fused_moe_reference(**layer))


@narrow_pairs
def test_few_rows_of_experts_that_begin_later(layout, config, forced):
    layer = make_layer(layout, Sizes(4, 16, 8, 256, 128), "cuda")
    first, here = 5, 6
    for name in ("w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias"):
        value = layer.get(name)
        if value is not None and value.dim() > 0 and value.shape[0] == 16:
            layer[name] = value[first : first + here]
    layer |= {"first_expert": first}
    forced(config, layer)
    expected = fused_moe_reference(**layer)
    assert_same_bits(moe_ext.fused_moe(**layer), expected)
    expert_map = torch.full((16,), -1, dtype=torch.int32, device="cuda")
    expert_map[first : first + here] = torch.arange(here, dtype=torch.int32, device="cuda")
    layer |= {"first_expert": 0, "expert_map": expert_map}
    assert_same_bits(moe_ext.fused_moe(**layer), expected)


@narrow_pairs
def test_few_rows_replayed_with_ids_of_the_kernel_before(layout, config, forced):
    layers = [make_layer(layout, Sizes(4, 96, 8, 256, 128), "cuda", seed=seed) for seed in (1, 2)]
    own = layers[0] | {name: layers[0][name].clone() for name in ("hidden_states", "topk_ids")}
    source = {name: own[name].clone() for name in ("hidden_states", "topk_ids")}
    variants = [own | {name: layer[name] for name in source} for layer in layers]
    expected = [fused_moe_reference(**variant) for variant in variants]
    out = torch.empty_like(own["hidden_states"])
    forced(config, own)

    def layer_behind_copies():
        for _ in range(3):
            for name, value in source.items():
                own[name].copy_(value)
            moe_ext.fused_moe_out(**own, out=out)

    graph = captured(layer_behind_copies)
    for turn in range(40):
        for name, value in source.items():
            value.copy_(variants[turn % 2][name])
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, expected[turn % 2])


@pytest.mark.parametrize("sizes", [Sizes(150, 6, 3, 400, 128), Sizes(8500, 16, 8, 192, 256)])
def test_plain_order_with_scales_per_block(sizes, forced):
    layer = random_layer("block", "swiglu", sizes, "cuda")
    layer["topk_ids"][::3] = -1
    expected = moe_ext.fused_moe(**layer)
    layer["hidden_states"] = in_poison(layer["hidden_states"])
    layer["hidden_states"][::3] = float("nan")
    forced(next(config for config in gathering_kernels("block") if config.id == PLAIN_BLOCK), layer)
    out = moe_ext.fused_moe(**layer)
    assert_same_bits(out, expected)
    layer["hidden_states"][::3] = 0
    assert_layer_is_right(out, layer)


def test_every_layout_has_such_kernels():
    assert {pair.values[0] for pair in PAIRS} == set(LAYOUTS)
