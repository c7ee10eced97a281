"""`moe_ext.compat` against references: the signatures of vLLM and torch."""

from __future__ import annotations

import enum
import itertools
from types import SimpleNamespace

import moe_ext
import pytest
import torch
from moe_ext.compat import fused_experts, grouped_mm
from support.fused_moe import Sizes, assert_layer_is_right, random_layer
from support.nn import inputs_of
from support.tolerance import assert_close_to_reference, assert_same_bits

SIZES = Sizes(num_tokens=21, num_experts=6, top_k=2, hidden=256, intermediate=192)
NAMES = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "swiglu_oai": "swigluoai_uninterleave",
    "relu2": "relu2_no_mul",
    "silu": "silu_no_mul",
}
FLAGS = {
    "bf16": {},
    "tensor": {},
    "expert": {},
    "channel": {"per_channel_quant": True},
    "block": {"block_shape": [128, 128]},
    "segments": {"block_shape": [128, 128]},
}


def operands(layer):
    hidden, weights, ids = inputs_of(layer)
    return hidden, layer["w13"], layer["w2"], weights, ids


def quantization(layer, layout):
    """The same weights in vLLM's words."""
    if layout == "bf16":
        return {}
    w1_scale = layer["w13_scale"]
    if layout == "segments":
        w1_scale = w1_scale.flatten(1, 2)
    scales = {"w1_scale": w1_scale, "w2_scale": layer["w2_scale"]}
    return {"use_fp8_w8a8": True, **FLAGS[layout], **scales}


@pytest.mark.parametrize("activation", NAMES)
def test_activations(activation, device):
    layer = random_layer("bf16", activation, SIZES, device)
    out = fused_experts(*operands(layer), activation=NAMES[activation])
    assert_layer_is_right(out, layer)


@pytest.mark.parametrize("layout", FLAGS)
def test_layouts_of_scales(layout, device):
    layer = random_layer(layout, "swiglu", SIZES, device)
    assert_layer_is_right(fused_experts(*operands(layer), **quantization(layer, layout)), layer)


@pytest.mark.parametrize("layout", ["bf16", "channel", "block"])
def test_a_quant_config(layout, device):
    layer = random_layer(layout, "swiglu", SIZES, device)
    said = quantization(layer, layout)
    config = SimpleNamespace(
        use_fp8_w8a8=layout != "bf16",
        per_act_token_quant=layout == "channel",
        block_shape=said.get("block_shape"),
        w1_scale=said.get("w1_scale"),
        w2_scale=said.get("w2_scale"),
        use_int8_w8a8=False,
        w1_zp=None,
    )
    out = fused_experts(*operands(layer), quant_config=config)
    assert_same_bits(out, fused_experts(*operands(layer), **said))


def test_static_scales_of_activations(device):
    layer = random_layer("expert", "swiglu", SIZES, device)
    layer |= {
        "a1_scale": torch.tensor([0.01], device=device),
        "a2_scale": torch.tensor([0.02], device=device),
    }
    given = {"a1_scale": layer["a1_scale"].reshape(()), "a2_scale": layer["a2_scale"]}
    out = fused_experts(*operands(layer), **quantization(layer, "expert"), **given)
    assert_layer_is_right(out, layer)


def test_biases_interleaving_and_limits_of_gpt_oss(device):
    layer = random_layer("bf16", "swiglu_oai", SIZES, device)
    layer |= {
        "gate_up_layout": "interleaved",
        "w13_bias": torch.randn(6, 384, device=device),
        "w2_bias": torch.randn(6, 256, device=device),
        "alpha": 1.5,
        "limit": 2.0,
    }
    config = SimpleNamespace(
        w1_bias=layer["w13_bias"], w2_bias=layer["w2_bias"], gemm1_alpha=1.5, gemm1_clamp_limit=2.0
    )
    out = fused_experts(*operands(layer), activation="swigluoai", quant_config=config)
    assert_layer_is_right(out, layer)


def test_an_enumeration_and_no_mul(device):
    kind = enum.Enum("MoEActivation", {"RELU2": "relu2"})
    layer = random_layer("bf16", "relu2", SIZES, device)
    out = fused_experts(*operands(layer), activation=kind.RELU2, is_act_and_mul=False)
    assert_layer_is_right(out, layer)


def test_in_place(device):
    layer = random_layer("bf16", "swiglu", SIZES, device)
    hidden, *others = operands(layer)
    expected = fused_experts(hidden, *others)
    written = hidden.clone()
    assert fused_experts(written, *others, True) is written
    assert_same_bits(written, expected)


def test_experts_of_a_rank(device):
    layer = random_layer("bf16", "swiglu", SIZES, device)
    hidden, w1, w2, weights, ids = operands(layer)
    expected = fused_experts(hidden, w1, w2, weights, ids).float()
    total = torch.zeros_like(expected)
    for own in ([4, 0, 1], [5, 3, 2]):
        expert_map = torch.full((6,), -1, dtype=torch.int32)
        expert_map[own] = torch.arange(3, dtype=torch.int32)
        total += fused_experts(
            hidden,
            w1[own],
            w2[own],
            weights,
            ids,
            expert_map=expert_map.to(device),
            global_num_experts=6,
        )
    assert_close_to_reference(total, expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_int8_w8a8": True}, "`use_int8_w8a8` must be None or False, got True"),
        ({"use_int8_w8a16": True}, "`use_int8_w8a16`"),
        ({"use_int4_w4a16": True}, "`use_int4_w4a16`"),
        ({"use_mxfp4_w4a4": True}, "`use_mxfp4_w4a4`"),
        ({"ocp_mx_scheme": "w_mxfp4"}, "`ocp_mx_scheme` must be None or False, got 'w_mxfp4'"),
        ({"w1_zp": torch.zeros(2)}, r"`w1_zp` must be None or False, got a tensor of \(2,\)"),
        ({"w2_zp": torch.zeros(2)}, "`w2_zp`"),
        ({"activation": "swiglustep"}, "`activation` must be one of silu, .*got 'swiglustep'"),
        (
            {"activation": "gelu", "is_act_and_mul": False},
            "one of silu_no_mul, relu2_no_mul without is_act_and_mul, got 'gelu'",
        ),
        ({"use_fp8_w8a8": True}, "`use_fp8_w8a8` must be False for `w1` of bfloat16, got True"),
        ({"block_shape": [128, 128]}, "`block_shape` must be None for bfloat16 weights"),
        ({"per_channel_quant": True}, "`per_channel_quant` must be None for bfloat16 weights"),
        ({"w1_scale": torch.ones(6)}, r"`w1_scale` must be None .*got a tensor of \(6,\)"),
        ({"global_num_experts": 8}, "must be -1 or 6, the number of experts of `w1`, got 8"),
        (
            {"global_num_experts": 8, "expert_map": torch.zeros(7, dtype=torch.int32)},
            "must be -1 or 7, the number of experts of `expert_map`, got 8",
        ),
        (
            {"quant_config": SimpleNamespace(use_int4_w4a16=True)},
            "`use_int4_w4a16` of quant_config must be None or False, got True",
        ),
        ({"quant_config": SimpleNamespace(w1_zp=torch.ones(1))}, "`w1_zp` of quant_config"),
        ({"quant_config": 5}, "`quant_config` must have the properties of .*, got int"),
        ({"quant_config": {"use_fp8_w8a8": True}}, "`quant_config` must have .*, got dict"),
        ({"quant_config": SimpleNamespace(gemm1_beta=2.0)}, "`gemm1_beta` of .* None or 1, got 2"),
        (
            {"quant_config": SimpleNamespace(), "w1_bias": torch.ones(6, 384)},
            "`quant_config` must be None beside flags, scales or biases",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(given, message):
    layer = random_layer("bf16", "swiglu", SIZES)
    with pytest.raises(ValueError, match=message):
        fused_experts(*operands(layer), **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_fp8_w8a8": False}, "must be True for `w1` of float8_e4m3fn, got False"),
        ({"block_shape": [64, 128]}, r"must be \[128, 128\] or None, got \[64, 128\]"),
        ({"w2_scale": None}, "`w2_scale` must be a tensor for FP8 weights, got None"),
        ({"per_channel_quant": True}, r"`w1_scale` must have shape \(6, 384\) or"),
        (
            {"block_shape": None, "w1_scale": torch.ones(6, 384)},
            r"`w1_scale` must have shape \(6,\), got \(6, 384\)",
        ),
        (
            {"block_shape": [128, 128], "w1_scale": torch.ones(6, 5, 2)},
            r"`w1_scale` must have shape \(6, 3, 2\), got \(6, 5, 2\)",
        ),
    ],
)
def test_flags_and_scales_must_agree(given, message):
    layer = random_layer("expert", "swiglu", SIZES)
    with pytest.raises(ValueError, match=message):
        fused_experts(*operands(layer), **(quantization(layer, "expert") | given))


@pytest.mark.parametrize("call", ["names", "positions"])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float32])
def test_grouped_mm(call, out_dtype, device):
    a = torch.randn(50, 96, device=device).bfloat16()
    weight = torch.randn(5, 40, 96, device=device).bfloat16()
    offs = torch.tensor([7, 7, 20, 49, 50], dtype=torch.int32, device=device)
    b = weight.transpose(-2, -1)
    if call == "names":
        out = grouped_mm(a, b, offs=offs, bias=None, out_dtype=out_dtype)
    else:
        out = grouped_mm(a, b, offs, None, out_dtype)
    assert out.dtype is (out_dtype or torch.bfloat16)
    begins = [0, *offs.tolist()]
    rows = [
        a[begin:end].float() @ b[group].float()
        for group, (begin, end) in enumerate(itertools.pairwise(begins))
    ]
    assert_close_to_reference(out, torch.cat(rows))
    assert_same_bits(out, moe_ext.grouped_gemm(a, weight, offs, out_dtype=out_dtype))


def test_grouped_mm_as_torch_has_it(device):
    a = torch.randn(40, 64, device=device).bfloat16()
    b = torch.randn(3, 48, 64, device=device).bfloat16().transpose(-2, -1)
    offs = torch.tensor([16, 24, 40], dtype=torch.int32, device=device)
    expected = torch.nn.functional.grouped_mm(a, b, offs=offs)
    assert_close_to_reference(grouped_mm(a, b, offs=offs), expected.float())


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((8, 16), (16, 8)), "`mat_a` must have 2 dimensions and `mat_b` 3, got 2 and 2"),
        (((2, 8, 16), (2, 16, 8)), "got 3 and 3"),
        (((8, 16), (2, 16, 8)), r"column-major, .*got strides \(128, 8, 1\); store weights"),
    ],
)
def test_grouped_mm_refuses_other_operands(shapes, message):
    a, b = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    offs = torch.tensor([4, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        grouped_mm(a, b, offs=offs)


def test_grouped_mm_needs_offsets():
    a, b = torch.zeros(8, 16).bfloat16(), torch.zeros(2, 8, 16).bfloat16()
    with pytest.raises(ValueError, match="`offs` must be the end row of each group, got None"):
        grouped_mm(a, b.transpose(-2, -1))
