"""`Experts.from_state_dict` and `from_linears`: forms of checkpoints, cuts, FP8, memory."""

from __future__ import annotations

import itertools
import weakref

import moe_ext
import pytest
import torch
from moe_ext.nn import Experts
from support.fused_moe import (
    Sizes,
    dequantized,
    integer_layer,
    plain_layer,
    quantize_weight,
    random_layer,
)
from support.nn import inputs_of, options_of, packed, per_expert
from support.tolerance import assert_close_to_reference, assert_same_bits
from torch import nn

FP8 = torch.float8_e4m3fn
WIDE = Sizes(hidden=192, intermediate=256)


def with_biases(layer):
    experts, n, _ = layer["w13"].shape
    return layer | {
        "w13_bias": torch.randn(experts, n).bfloat16(),
        "w2_bias": torch.randn(experts, layer["w2"].shape[1]),
    }


def check(layer, tensors, **arguments):
    experts = Experts.from_state_dict(tensors, **options_of(layer), **arguments)
    assert_close_to_reference(experts(*inputs_of(layer)), plain_layer(layer))
    return experts


@pytest.mark.parametrize("layout", ["bf16", "expert", "channel", "segments"])
@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
def test_per_expert(layout, names, scale):
    layer = with_biases(random_layer(layout, "swiglu", Sizes()))
    tensors = per_expert(layer, "mlp.experts.", names, scale)
    tensors["mlp.gate.weight"] = torch.ones(5, 192)  # the router's, not ours
    for prefix in ("mlp.experts", "mlp.experts."):
        experts = check(layer, tensors, prefix=prefix)
    if layout == "segments":  # 96 is no multiple of 128: gate and up keep grids of their own
        assert experts.w13_scale.shape == (5, 2, 1, 2)


@pytest.mark.parametrize("names", [("up_proj", "down_proj"), ("w1", "w2")])
def test_ungated_per_expert(names):
    layer = with_biases(random_layer("block", "relu2", Sizes()))
    check(layer, per_expert(layer, "", names))


def test_grids_of_whole_blocks_become_one():
    layer = random_layer("segments", "swiglu", WIDE)
    experts = check(layer, per_expert(layer))
    assert experts.w13_scale.shape == (5, 4, 2)
    assert torch.equal(experts.w13_scale, layer["w13_scale"].reshape(5, 4, 2))


@pytest.mark.parametrize("activation", ["swiglu", "geglu_tanh"])
@pytest.mark.parametrize("layout", ["bf16", "tensor", "expert", "channel", "block", "segments"])
@pytest.mark.parametrize("transposed", [False, True])
def test_packed(layout, activation, transposed):
    layer = with_biases(random_layer(layout, activation, Sizes()))
    tensors = packed(layer, "experts.", transposed)
    for name, tensor in tensors.items():
        if transposed and name.endswith("scale_inv") and tensor.dim() == 3:
            tensors[name] = tensor.mT
    check(layer, tensors, prefix="experts")
    check(layer, tensors, prefix="experts", transposed=transposed)


@pytest.mark.parametrize("layout", ["bf16", "channel", "block"])
def test_gpt_oss(layout):
    layer = with_biases(random_layer(layout, "swiglu_oai", Sizes()))
    layer["gate_up_layout"] = "interleaved"
    tensors = packed(layer, transposed=layout == "bf16")
    experts = check(layer, tensors)
    assert (experts.gate_up_layout, experts.activation) == ("interleaved", "swiglu_oai")


def test_ungated_packed():
    layer = random_layer("bf16", "relu2", Sizes())
    check(layer, {"up_proj": layer["w13"], "down_proj": layer["w2"]})
    turned = {"up_proj": layer["w13"].mT, "down_proj": layer["w2"].mT}
    check(layer, turned, transposed=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_become_bfloat16(dtype):
    layer = random_layer("bf16", "swiglu", Sizes())
    for form in (per_expert, packed):
        tensors = {name: tensor.to(dtype) for name, tensor in form(layer).items()}
        experts = check(layer, tensors)
        assert experts.w13.dtype is torch.bfloat16


def test_bfloat16_and_e8m0_scales_are_taken_exactly():
    layer = random_layer("segments", "swiglu", Sizes())
    for name in ("w13_scale", "w2_scale"):
        layer[name] = 2.0 ** torch.randint(-9, -6, layer[name].shape).float()
    tensors = per_expert(layer)
    for name in list(tensors):
        if name.endswith("scale"):
            kind = torch.bfloat16 if "up" in name else torch.float8_e8m0fnu
            tensors[name] = tensors[name].to(kind)
    check(layer, tensors)


def test_static_scales_are_the_largest():
    layer = random_layer("expert", "swiglu", Sizes())
    layer |= {"a1_scale": torch.tensor(0.02), "a2_scale": torch.tensor(0.03)}
    tensors = per_expert(layer)
    for name in list(tensors):
        if name.endswith("input_scale") and not name.startswith("2"):
            tensors[name] = tensors[name] / 2
    experts = check(layer, tensors)
    assert experts.a1_scale.shape == experts.a2_scale.shape == ()


def uneven(static):
    """A layer per channel whose gate and up have one scale each, and its checkpoint."""
    layer = random_layer("bf16", "swiglu", Sizes())
    tensors, scales = per_expert(layer), {"gate_proj": 1.0, "up_proj": 3.0, "down_proj": 1.0}
    for name in list(tensors):
        weight = tensors[name].float() * scales[name.split(".")[1]]
        q, scale = quantize_weight(weight[None], "tensor", halves=False)
        tensors[name] = q[0]
        tensors[name.replace("weight", "weight_scale")] = scale.reshape(1)
        if static:
            tensors[name.replace("weight", "input_scale")] = torch.tensor([0.02])
    return layer, tensors


def test_unequal_scales_of_gate_and_up_become_scales_of_channels():
    layer, tensors = uneven(static=False)
    experts = Experts.from_state_dict(tensors)
    assert (experts.w13_scale.shape, experts.w2_scale.shape) == ((5, 192), (5,))
    for e in range(5):
        own = dequantized(experts.w13.data, experts.w13_scale)[e].chunk(2)
        for part, name in zip(own, ("gate_proj", "up_proj"), strict=True):
            stored = tensors[f"{e}.{name}.weight"].float() * tensors[f"{e}.{name}.weight_scale"]
            assert torch.equal(part, stored)
    full = {name: getattr(experts, name) for name in experts.state_dict()}
    assert_close_to_reference(experts(*inputs_of(layer)), plain_layer(layer | full))


def test_static_scales_ask_for_the_larger_scale_of_gate_and_up():
    _, tensors = uneven(static=True)
    experts = Experts.from_state_dict(tensors)
    assert experts.w13_scale.shape == (5,)
    for e in range(5):
        scales = [tensors[f"{e}.{name}.weight_scale"] for name in ("gate_proj", "up_proj")]
        assert experts.w13_scale[e] == max(scales)
        gate, up = (experts.w13[e].float() * experts.w13_scale[e]).chunk(2)
        stored = [
            tensors[f"{e}.{name}.weight"].float() * scale
            for name, scale in zip(("gate_proj", "up_proj"), scales, strict=True)
        ]
        assert torch.equal(up, stored[1])  # three times as large
        assert ((gate - stored[0]).abs() <= stored[0].abs() / 16 + experts.w13_scale[e] / 512).all()


class Expert(nn.Module):
    """Three linears, as most models have them."""

    def __init__(self, names=("gate_proj", "up_proj", "down_proj"), bias=False):
        super().__init__()
        gate, up, down = names
        make = {"bias": bias, "dtype": torch.bfloat16}
        self.add_module(gate, nn.Linear(192, 96, **make))
        self.add_module(up, nn.Linear(192, 96, **make))
        self.add_module(down, nn.Linear(96, 192, **make))
        self.act_fn = nn.SiLU()


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize("bias", [False, True])
def test_linears(names, bias):
    linears = nn.ModuleList(Expert(names, bias) for _ in range(4))
    x, gate, up, down = torch.randn(6, 192).bfloat16(), *names
    ids, weights = torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    expected = torch.zeros(6, 192)
    for token in range(6):
        for j in range(2):
            expert = linears[ids[token, j]].float()
            inner = nn.functional.silu(getattr(expert, gate)(x[token].float()))
            inner = (inner * getattr(expert, up)(x[token].float())).bfloat16().float()
            row = getattr(expert, down)(inner).bfloat16().float()
            expected[token] += weights[token, j] * row
    experts = Experts.from_linears(linears.bfloat16())
    assert_close_to_reference(experts(x, weights, ids), expected.detach())
    assert getattr(linears[0], gate).weight is not None


def test_consumed_linears_lose_their_weights():
    linears = nn.ModuleList(Expert(bias=True) for _ in range(2))
    held = [weakref.ref(p) for p in linears.parameters()]
    assert len(held) == 12
    Experts.from_linears(linears, consume=True)
    assert list(linears.parameters()) == []
    assert [ref() for ref in held] == [None] * 12


@pytest.mark.parametrize("form", [per_expert, packed])
def test_consumed_state_dicts_lose_what_was_read(form):
    layer = with_biases(random_layer("expert", "swiglu", Sizes()))
    tensors = form(layer) | {"gate.weight": torch.ones(1)}
    held = [weakref.ref(t) for name, t in tensors.items() if name.endswith("proj.weight")]
    kept = dict.fromkeys(tensors)
    Experts.from_state_dict(tensors)
    assert tensors.keys() == kept.keys()
    Experts.from_state_dict(tensors, quantize=None, device="cpu", consume=True)
    assert list(tensors) == ["gate.weight"]
    assert [ref() for ref in held] == [None] * len(held)


def test_consume_leaves_everything_where_something_does_not_fit():
    layer = random_layer("bf16", "swiglu", Sizes())
    tensors = per_expert(layer)
    tensors["4.down_proj.weight"] = tensors["4.down_proj.weight"][:, :-8]
    names = list(tensors)
    with pytest.raises(ValueError, match=r"4\.down_proj\.weight"):
        Experts.from_state_dict(tensors, consume=True)
    assert list(tensors) == names


def test_packed_weights_that_fit_are_shared_and_others_copied():
    layer = random_layer("bf16", "swiglu", Sizes())
    tensors = packed(layer)
    experts = Experts.from_state_dict(tensors)
    assert experts.w13.data_ptr() == tensors["gate_up_proj"].data_ptr()
    assert experts.w2.data_ptr() == tensors["down_proj"].data_ptr()
    for arguments in ({"num_local": 2}, {"intermediate_range": (0, 48)}, {"quantize": "block"}):
        experts = Experts.from_state_dict(tensors, **arguments)
        for weight in (experts.w13, experts.w2):
            sources = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
            assert weight.untyped_storage().data_ptr() not in sources


def test_rows_that_are_not_aligned_are_padded():
    layer = random_layer("channel", "swiglu", Sizes(intermediate=232))
    for form in (per_expert, packed):
        experts = check(layer, form(layer))
        assert experts.w2.stride() == (192 * 240, 240, 1)


@pytest.mark.parametrize("how", ["block", "channel", "tensor"])
@pytest.mark.parametrize("form", [per_expert, packed])
@pytest.mark.parametrize("activation", ["swiglu", "interleaved"])
def test_quantize(how, form, activation):
    layer = random_layer("bf16", "swiglu", Sizes())
    if activation == "interleaved":
        if form is per_expert:
            pytest.skip("gate and up have weights of their own")
        layer["gate_up_layout"] = "interleaved"
    experts = Experts.from_state_dict(form(layer), quantize=how, **options_of(layer))
    assert experts.w13.dtype is experts.w2.dtype is FP8
    granularity = {"block": "128x128", "channel": "row", "tensor": "tensor"}[how]
    parts = (layer["w13"],)
    if how == "block" and activation != "interleaved":
        parts = layer["w13"].chunk(2, dim=1)
    q, scales = zip(*(moe_ext.quantize_fp8(part, granularity) for part in parts), strict=True)
    assert_same_bits(experts.w13.data.flatten(0, 1), torch.cat(q, dim=1).flatten(0, 1))
    expected = torch.stack(scales, dim=1) if len(parts) == 2 else scales[0]
    assert torch.equal(experts.w13_scale, expected)
    full = {name: getattr(experts, name) for name in experts.state_dict()}
    assert_close_to_reference(experts(*inputs_of(layer)), plain_layer(layer | full))


@pytest.mark.parametrize("layout", ["bf16", "tensor", "channel", "segments"])
@pytest.mark.parametrize("form", [per_expert, packed])
def test_ranks_of_experts_sum_to_the_whole(layout, form):
    layer = integer_layer(layout, Sizes())
    tensors = form(layer)
    ranks = [
        Experts.from_state_dict(tensors, first_expert=first, num_local=count)
        for first, count in ((0, 2), (2, 1), (3, None))
    ]
    assert [(rank.first_expert, rank.num_experts) for rank in ranks] == [(0, 2), (2, 1), (3, 2)]
    total = sum(rank(*inputs_of(layer)).float() for rank in ranks)
    assert total.abs().max() > 0
    assert torch.equal(total, plain_layer(layer))


def test_a_rank_needs_no_other_experts():
    layer = random_layer("bf16", "swiglu", Sizes())
    tensors = {n: t for n, t in per_expert(layer).items() if n[0] in "23"}
    rank = Experts.from_state_dict(tensors, num_experts=5, first_expert=2, num_local=2)
    mine = {name: layer[name][2:4] for name in ("w13", "w2")} | {"first_expert": 2}
    assert_close_to_reference(rank(*inputs_of(layer)), plain_layer(layer | mine))


@pytest.mark.parametrize("cuts", [(0, 128, 256), (0, 256), (0, 128, 192, 256)])
@pytest.mark.parametrize("layout", ["bf16", "channel", "segments", "block", "interleaved"])
@pytest.mark.parametrize("form", [per_expert, packed])
def test_shards_of_the_intermediate_sum_to_the_whole(cuts, layout, form):
    interleaved = layout == "interleaved"
    layer = integer_layer("bf16" if interleaved else layout, WIDE)
    layer["w2_bias"] = torch.randint(-2, 3, (5, 192)) * 32.0
    if 192 in cuts and layout != "bf16" and not interleaved:
        pytest.skip("begins inside a block")
    if interleaved:
        if form is per_expert:
            pytest.skip("gate and up have weights of their own")
        order = torch.arange(512).reshape(2, 256).t().flatten()
        layer |= {name: layer[name][:, order] for name in ("w13", "w13_bias")}
        layer["gate_up_layout"] = "interleaved"
    if form is per_expert and layout == "block":
        pytest.skip("has gate and up apart: segments")
    tensors = form(layer)
    shards = [
        Experts.from_state_dict(tensors, intermediate_range=cut, **options_of(layer))
        for cut in itertools.pairwise(cuts)
    ]
    assert [shard.w2_bias is None for shard in shards] == [False] + [True] * (len(shards) - 1)
    assert sum(shard.intermediate_size for shard in shards) == 256
    total = sum(shard(*inputs_of(layer)).float() for shard in shards)
    assert torch.equal(total, plain_layer(layer))


@pytest.mark.parametrize("cut", [(64, 160), (200, 256), (0, 64), (128, 200)])
@pytest.mark.parametrize("layout", ["segments", "interleaved"])
def test_padded_shards_are_the_layer_without_other_features(cut, layout):
    layer = random_layer("block" if layout == "interleaved" else layout, "swiglu", WIDE)
    layer = with_biases(layer)
    if layout == "interleaved":
        layer["gate_up_layout"] = "interleaved"
    form = packed if layout == "interleaved" else per_expert
    shard = Experts.from_state_dict(
        form(layer), intermediate_range=cut, pad_blocks=True, **options_of(layer)
    )
    front = cut[0] % 128
    assert shard.intermediate_size == cut[1] - cut[0] + front
    inside = torch.zeros(256, dtype=torch.bool)
    inside[slice(*cut)] = True
    rows = inside.repeat_interleave(2) if layout == "interleaved" else inside.repeat(2)
    masked = layer | {
        "w13": (layer["w13"].float() * rows[:, None]).to(FP8),
        "w13_bias": layer["w13_bias"] * rows,
        "w2": (layer["w2"].float() * inside).to(FP8),
    }
    if cut[0]:
        masked.pop("w2_bias")
    assert_same_bits(shard(*inputs_of(layer)), moe_ext.fused_moe(**masked))


def test_padded_shards_of_mixed_layouts():
    layer = random_layer("channel", "swiglu", WIDE)
    blocks = random_layer("block", "swiglu", WIDE)
    layer |= {name: blocks[name] for name in ("w2", "w2_scale")}
    cut = {"intermediate_range": (64, 256), "pad_blocks": True}
    shard = Experts.from_state_dict(per_expert(layer), **cut)
    inside = torch.arange(256) >= 64
    masked = {"w13": (layer["w13"].float() * inside.repeat(2)[:, None]).to(FP8)}
    assert_same_bits(shard(*inputs_of(layer)), moe_ext.fused_moe(**(layer | masked)))


def test_shards_are_cut_before_they_are_quantised():
    layer = random_layer("bf16", "swiglu", WIDE)
    shard = Experts.from_state_dict(
        per_expert(layer), intermediate_range=(64, 160), quantize="block"
    )
    assert (shard.intermediate_size, shard.w13_scale.shape) == (96, (5, 2, 1, 2))
    bf16 = Experts.from_state_dict(per_expert(layer), intermediate_range=(64, 160))
    expected, _ = moe_ext.quantize_fp8(bf16.w2.data, "128x128")
    assert_same_bits(shard.w2.data.flatten(0, 1), expected.flatten(0, 1))
