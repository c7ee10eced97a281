"""Layers of few slots: their rows are listed by the sort, which runs beside what quantises tokens.

Up to 128 slots of up to 16 tokens; in BF16 up to 64. Sizes are at these limits and one beyond.
"""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext.reference import fused_moe_reference
from support.fused_moe import Sizes, random_layer
from support.gathering import make_layer, narrow_pairs
from support.graphs import captured
from support.inputs import in_poison
from support.tolerance import assert_same_bits

pytestmark = pytest.mark.gpu

sizes_of_slots = pytest.mark.parametrize(
    "sizes",
    [
        Sizes(16, 128, 8, 256, 128),
        Sizes(17, 40, 7, 256, 128),
        Sizes(13, 40, 10, 256, 128),
        Sizes(8, 70, 8, 256, 128),
        Sizes(5, 70, 13, 256, 128),
        Sizes(16, 3, 2, 256, 128),
        Sizes(12, 600, 10, 256, 128),
        Sizes(3, 129, 11, 256, 128),
        # A row of 1024 is quantised by 128 threads, of 512 by 64, of 8208 in parts.
        Sizes(2, 9, 4, 1024, 128),
        Sizes(2, 9, 4, 512, 1040),
        Sizes(2, 3, 2, 8208, 128),
    ],
    ids=lambda s: f"{s.num_tokens}x{s.top_k}of{s.num_experts}-{s.hidden}x{s.intermediate}",
)


@narrow_pairs
@sizes_of_slots
def test_sizes(layout, config, sizes, forced):
    layer = make_layer(layout, sizes, "cuda")
    expected = fused_moe_reference(**layer)
    layer["hidden_states"] = in_poison(layer["hidden_states"])
    forced(config, layer)
    assert_same_bits(moe_ext.fused_moe(**layer), expected)


@narrow_pairs
@pytest.mark.parametrize("num_tokens", [2, 8, 16])
def test_all_choices_are_one_expert(layout, config, num_tokens, forced):
    # More rows of one expert than a piece of the list has, and than a tile has tokens.
    layer = make_layer(layout, Sizes(num_tokens, 6, 4, 256, 128), "cuda")
    layer["topk_ids"].fill_(3)
    forced(config, layer)
    assert_same_bits(moe_ext.fused_moe(**layer), fused_moe_reference(**layer))


@narrow_pairs
def test_pieces_behind_pieces(layout, config, forced):
    layer = make_layer(layout, Sizes(16, 6, 4, 256, 128), "cuda")
    ids = torch.tensor([[1, 1, 2, 4]] * 11 + [[4, 4, 4, 5]] * 4 + [[-1, 9, 1, 0]])
    layer["topk_ids"] = ids.to(layer["topk_ids"])
    forced(config, layer)
    assert_same_bits(moe_ext.fused_moe(**layer), fused_moe_reference(**layer))


@narrow_pairs
def test_replays_with_more_and_fewer_experts(layout, config, forced):
    sizes = Sizes(8, 64, 8, 256, 128)
    own = make_layer(layout, sizes, "cuda")
    routings = [own["topk_ids"].clone() for _ in range(4)]
    routings[1][:] = routings[1][0, 0]
    routings[2][:, 1:] = -1
    routings[3].fill_(-1)
    expected = [fused_moe_reference(**(own | {"topk_ids": ids})) for ids in routings]
    out = torch.empty_like(own["hidden_states"])
    forced(config, own)
    # Two in a row: the second may begin while the first still runs.
    graph = captured(lambda: [moe_ext.fused_moe_out(**own, out=out) for _ in range(2)])
    for turn in range(40):
        own["topk_ids"].copy_(routings[turn % 4])
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, expected[turn % 4])


def swiglu_layer(layout, sizes, device, seed):
    return random_layer(layout, "swiglu", sizes, device, seed)


@narrow_pairs
def test_a_token_alone_and_among_too_many_for_a_list(layout, config, forced):
    layer = make_layer(layout, Sizes(20, 24, 8, 1024, 384), "cuda", kind=swiglu_layer)
    forced(config, layer)
    together = moe_ext.fused_moe(**layer)
    for end in (1, 4, 16):
        rows = slice(end - 1, end)
        few = layer | {
            name: layer[name][:end] for name in ("hidden_states", "topk_weights", "topk_ids")
        }
        assert_same_bits(moe_ext.fused_moe(**few)[rows], together[rows])
