"""`moe_ext.nn.MoELayer`: modules, options and results that do not fit; moves keep the bias."""

from __future__ import annotations

import copy

import pytest
import torch
from moe_ext.nn import Experts, MoELayer
from torch import nn

HIDDEN, EXPERTS = 64, 8


class Returns(nn.Module):
    """Whatever a function makes of the input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def logits_of(x):
    return x[:, :EXPERTS].float()


def made(router=None, **options):
    experts = Experts(EXPERTS, HIDDEN, 32)
    for weight in (experts.w13, experts.w2):
        weight.data.fill_(0.125)
    router = Returns(logits_of) if router is None else router
    return MoELayer(router, experts, **({"top_k": 2} | options))


def message_of(function, *arguments, **options):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        function(*arguments, **options)
    return str(error.value)


MADE = {
    "shared": (
        {"shared_expert": torch.relu},
        "MoELayer: `shared_expert` must be None or an nn.Module, got builtin_function_or_method",
    ),
    "gate's kind": (
        {"shared_expert": nn.Identity(), "shared_expert_gate": 1.0},
        "MoELayer: `shared_expert_gate` must be None or an nn.Module, got 1.0",
    ),
    "gate's rows": (
        {"shared_expert": nn.Identity(), "shared_expert_gate": nn.Linear(HIDDEN, HIDDEN)},
        "MoELayer: `shared_expert_gate` must have a weight of shape (1, hidden) = (1, 64), got "
        "(64, 64)",
    ),
    "top_k": ({"top_k": 0}, "topk_routing: `top_k` must be 1 to 32, got 0"),
    "no top_k": ({"top_k": None}, "MoELayer: `top_k` must be an int, got None"),
    "scoring": (
        {"scoring": "x"},
        'topk_routing: `scoring` must be one of "softmax", "softmax_topk", "sigmoid", '
        '"sqrt_softplus", got "x"',
    ),
    "no scoring": ({"scoring": None}, "MoELayer: `scoring` must be a string, got None"),
    "groups": (
        {"num_groups": -3},
        "topk_routing: `num_groups` must be 1 to 32 and divide the 2048 experts of `logits`, got "
        "-3",
    ),
    "float groups": ({"num_groups": 2.0}, "MoELayer: `num_groups` must be an int, got 2.0"),
    "kept groups": (
        {"num_groups": 3, "topk_groups": 4},
        "topk_routing: `topk_groups` must be 1 to `num_groups` = 3, got 4",
    ),
    "groups of a bias": (
        {"num_groups": 3, "correction_bias": torch.zeros(EXPERTS)},
        "topk_routing: `num_groups` must be 1 to 32 and divide the 8 experts of `logits`, got 3",
    ),
    "bias": (
        {"correction_bias": [0.0]},
        "MoELayer: `correction_bias` must be None or a tensor, got [0.0]",
    ),
    "bias's shape": (
        {"correction_bias": torch.zeros(1, EXPERTS)},
        "topk_routing: `correction_bias` must have shape (num_experts,) = (8,), got (1, 8)",
    ),
    "renormalize": (
        {"renormalize": "yes"},
        'MoELayer: `renormalize` must be True or False, got "yes"',
    ),
    "scale": ({"scale": None}, "MoELayer: `scale` must be a number, got None"),
}


@pytest.mark.parametrize("name", MADE)
def test_what_a_layer_is_made_of(name):
    options, message = MADE[name]
    assert message_of(made, **options) == message


@pytest.mark.parametrize("groups", [1, 3, 7, 32])
def test_groups_of_an_unknown_number_of_experts_may_be_right(groups):
    assert made(num_groups=groups, topk_groups=groups, top_k=2).num_groups == groups


def shared(function):
    return {"shared_expert": Returns(function)}


def gate(function):
    return {"shared_expert": nn.Identity(), "shared_expert_gate": Returns(function)}


RETURNED = {
    "tuple of logits": (
        {"router": Returns(lambda x: (logits_of(x), x))},
        "`router` must return logits of shape (num_tokens, num_experts) = (6, *), got tuple",
    ),
    "flat logits": (
        {"router": Returns(lambda x: logits_of(x).flatten())},
        "`router` must return logits of shape (num_tokens, num_experts) = (6, *), got shape (48,)",
    ),
    "logits of others": (
        {"router": Returns(lambda x: logits_of(x)[1:])},
        "`router` must return logits of shape (num_tokens, num_experts) = (6, *), got shape (5, 8)",
    ),
    "nothing": (
        shared(lambda x: None),
        "`shared_expert` must return a tensor of shape (..., hidden) = (2, 3, 64), got None",
    ),
    "shared columns": (
        shared(lambda x: x[..., :1]),
        "`shared_expert` must return a tensor of shape (..., hidden) = (2, 3, 64), got shape "
        "(2, 3, 1)",
    ),
    "shared rows": (
        shared(lambda x: x.flatten(0, 1)),
        "`shared_expert` must return a tensor of shape (..., hidden) = (2, 3, 64), got shape "
        "(6, 64)",
    ),
    "wide gate": (
        gate(lambda x: x),
        "`shared_expert_gate` must return a tensor of shape (..., 1) = (2, 3, 1), got shape "
        "(2, 3, 64)",
    ),
    "no gate": (
        gate(lambda x: None),
        "`shared_expert_gate` must return a tensor of shape (..., 1) = (2, 3, 1), got None",
    ),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_modules_return(name):
    options, message = RETURNED[name]
    x = torch.randn(2, 3, HIDDEN).bfloat16()
    assert message_of(made(**options), x) == f"MoELayer: {message}"


def test_hidden_states():
    layer = made()
    assert message_of(layer, None) == "MoELayer: `hidden_states` must be a tensor, got None"
    form = "MoELayer: `hidden_states` must have shape (..., hidden_size) = (*, 64), got"
    assert message_of(layer, torch.zeros(3, 8)) == f"{form} (3, 8)"
    assert message_of(layer, torch.tensor(0.0)) == f"{form} ()"


MOVES = {
    "to": lambda layer: layer.to(torch.bfloat16),
    "half": lambda layer: layer.half(),
    "double": lambda layer: layer.double().float(),
    "in a parent": lambda layer: nn.Sequential(layer).bfloat16()[0],
    "copy": lambda layer: copy.deepcopy(layer).to("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("move", MOVES)
def test_moves_keep_the_bias(move, dtype):
    bias = (torch.arange(EXPERTS) + 1 / 3).to(dtype)
    router = nn.Linear(HIDDEN, EXPERTS)
    layer = MOVES[move](made(router, correction_bias=bias.clone()))
    assert layer.correction_bias.dtype is dtype
    assert torch.equal(layer.correction_bias, bias)
    assert "correction_bias" in layer.state_dict()
    assert move == "double" or layer.router.weight.dtype in (torch.bfloat16, torch.float16)


def test_moves_to_another_device_take_the_bias_along():
    layer = made(nn.Linear(HIDDEN, EXPERTS), correction_bias=torch.rand(EXPERTS))
    moved = layer.to("meta", torch.bfloat16).correction_bias
    assert (moved.device.type, moved.dtype) == ("meta", torch.float32)
    empty = layer.to_empty(device="cpu").correction_bias
    assert (empty.device.type, empty.dtype) == ("cpu", torch.float32)
