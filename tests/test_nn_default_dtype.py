"""`moe_ext.nn` does the same whatever torch's default dtype is."""

from __future__ import annotations

import pytest
import torch
from moe_ext.nn import Experts, MoELayer
from support.fused_moe import Sizes, random_layer
from support.nn import inputs_of, packed, per_expert
from support.tolerance import assert_same_bits
from torch import nn


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float64])
def other_default(request):
    default = torch.get_default_dtype()

    def switch():
        torch.set_default_dtype(request.param)

    yield switch
    torch.set_default_dtype(default)


@pytest.mark.parametrize("scales", [None, "block", "channel", "tensor"])
def test_empty_experts(other_default, scales):
    other_default()
    dtype = torch.bfloat16 if scales is None else torch.float8_e4m3fn
    experts = Experts(8, 64, 32, dtype=dtype, scales=scales, bias=True)
    assert experts.w13.dtype is experts.w2.dtype is dtype
    assert experts.w13_bias.dtype is experts.w2_bias.dtype is torch.bfloat16
    assert scales is None or experts.w13_scale.dtype is torch.float32


@pytest.mark.parametrize("form", [per_expert, packed])
@pytest.mark.parametrize("layout", ["bf16", "channel", "segments"])
def test_checkpoints(other_default, form, layout):
    layer = random_layer(layout, "swiglu", Sizes())
    tensors, inputs = form(layer), inputs_of(layer)
    expected = Experts.from_state_dict(dict(tensors))(*inputs)
    other_default()
    experts = Experts.from_state_dict(tensors)
    assert_same_bits(experts(*inputs), expected)


@pytest.mark.parametrize("quantize", [None, "block", "channel", "tensor"])
def test_linears(other_default, quantize):
    expert = nn.Module()
    expert.w1, expert.w3, expert.w2 = (nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(3))
    expected = Experts.from_linears([expert] * 2, quantize=quantize).state_dict()
    other_default()
    made = Experts.from_linears([expert] * 2, quantize=quantize).state_dict()
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        assert made[name].dtype is tensor.dtype
        assert torch.equal(made[name].float(), tensor.float())


@torch.no_grad()
def test_layers(other_default):
    other_default()
    experts = Experts(8, 64, 32)
    for weight in (experts.w13, experts.w2):
        weight.fill_(0.125)
    layer = MoELayer(nn.Linear(64, 8, dtype=torch.bfloat16), experts, top_k=2)
    out = layer(torch.ones(3, 64, dtype=torch.bfloat16))
    assert (out.shape, out.dtype) == ((3, 64), torch.bfloat16)
    assert MoELayer(nn.Linear(64, 8, dtype=torch.float32), experts, top_k=2).top_k == 2
