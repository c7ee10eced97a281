"""Arguments of the wrong kind are refused by the name that the caller gave, with what came."""

from __future__ import annotations

import pytest
import torch
from moe_ext.nn import Experts
from support.fused_moe import Sizes, random_layer
from support.nn import experts_of, inputs_of, packed, per_expert
from torch import nn

CONSTRUCTOR = {
    "many experts": (
        {"num_experts": 5000},
        "`num_experts` must be an int from 1 to 4096, got 5000",
    ),
    "hidden": (
        {"hidden_size": 12},
        "`hidden_size` must be a positive int, a multiple of 8, got 12",
    ),
    "true": (
        {"intermediate_size": True},
        "`intermediate_size` must be a positive int, a multiple of 8, got True",
    ),
    "no dtype": (
        {"dtype": None},
        "`dtype` must be torch.bfloat16 or torch.float8_e4m3fn, got None",
    ),
    "dtype's name": (
        {"dtype": "bfloat16"},
        '`dtype` must be torch.bfloat16 or torch.float8_e4m3fn, got "bfloat16"',
    ),
    "scales": (
        {"scales": 128},
        '`scales` must be None or one of "block", "channel", "tensor", got 128',
    ),
    "static scales": ({"static_scales": None}, "`static_scales` must be True or False, got None"),
    "bias": ({"bias": torch.zeros(1)}, "`bias` must be True or False, got Tensor"),
    "activation": ({"activation": ["silu"]}, "`activation` must be a string, got ['silu']"),
    "alpha": ({"alpha": "1"}, '`alpha` must be None or a number, got "1"'),
    "limit": ({"limit": "7"}, '`limit` must be None or a number, got "7"'),
    "layout": ({"gate_up_layout": None}, "`gate_up_layout` must be a string, got None"),
    "input": (
        {"apply_router_weight_on_input": 1},
        "`apply_router_weight_on_input` must be True or False, got 1",
    ),
    "first": ({"first_expert": None}, "`first_expert` must be an int, got None"),
    "no scale": ({"routed_scale": None}, "`routed_scale` must be a number, got None"),
    "scale that is none": (
        {"routed_scale": float("nan")},
        "`routed_scale` must be finite in float32, got nan",
    ),
    "scale": ({"routed_scale": "x"}, '`routed_scale` must be a number, got "x"'),
    "accumulate": ({"accumulate": 1}, "`accumulate` must be a string, got 1"),
    "invariant": (
        {"batch_invariant": None},
        "`batch_invariant` must be True or False, got None",
    ),
}


def message_of(function, *arguments, **options):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        function(*arguments, **options)
    return str(error.value)


@pytest.mark.parametrize("name", CONSTRUCTOR)
def test_constructor(name):
    options, message = CONSTRUCTOR[name]
    sizes = {"num_experts": 4, "hidden_size": 64, "intermediate_size": 32}
    assert message_of(Experts, **(sizes | options)) == f"Experts: {message}"


CALL = {
    "hidden": ({"hidden_states": None}, "`hidden_states` must be a tensor, got None"),
    "list": ({"hidden_states": [1.0]}, "`hidden_states` must be a tensor, got [1.0]"),
    "weights": ({"topk_weights": None}, "`topk_weights` must be a tensor, got None"),
    "ids": ({"topk_ids": None}, "`topk_ids` must be a tensor, got None"),
    "addend": ({"addend": 0.5}, "`addend` must be None or a tensor, got 0.5"),
    "map": ({"expert_map": [0, 1]}, "`expert_map` must be None or a tensor, got [0, 1]"),
    "out": ({"out": "x"}, '`out` must be None or a tensor, got "x"'),
    "workspace": ({"workspace": 1024}, "`workspace` must be None or a tensor, got 1024"),
}


@pytest.fixture
def call():
    layer = random_layer("bf16", "swiglu", Sizes())
    names = ("hidden_states", "topk_weights", "topk_ids")
    return experts_of(layer), dict(zip(names, inputs_of(layer), strict=True))


@pytest.mark.parametrize("name", CALL)
def test_call(call, name):
    experts, arguments = call
    changes, message = CALL[name]
    assert message_of(experts, **(arguments | changes)) == f"Experts: {message}"


@pytest.mark.parametrize(
    ("name", "last"),
    [("topk_weights", "top_k"), ("topk_ids", "top_k"), ("addend", "hidden_size")],
)
def test_call_with_no_dimensions(call, name, last):
    experts, arguments = call
    arguments = {key: tensor[0] for key, tensor in arguments.items()}
    message = message_of(experts, **(arguments | {name: torch.tensor(1.0)}))
    assert message == f"Experts: `{name}` must have shape (..., {last}), got ()"


PAIR = "`intermediate_range` must be None or (begin, end), two ints, got"
SELECTION = {
    "one end": ({"intermediate_range": (0,)}, f"{PAIR} (0,)"),
    "size": ({"intermediate_range": 8}, f"{PAIR} 8"),
    "floats": ({"intermediate_range": (0.0, 16.0)}, f"{PAIR} (0.0, 16.0)"),
    "local": ({"num_local": 2.0}, "`num_local` must be None or an int, got 2.0"),
    "first": ({"first_expert": None}, "`first_expert` must be an int, got None"),
    "quantize": ({"quantize": True}, "`quantize` must be None or a string, got True"),
    "consume": ({"consume": None}, "`consume` must be True or False, got None"),
}
STATE_DICT = SELECTION | {
    "number": ({"num_experts": 5.0}, "`num_experts` must be None or an int, got 5.0"),
    "prefix": ({"prefix": None}, "`prefix` must be a string, got None"),
    "pad": ({"pad_blocks": 128}, "`pad_blocks` must be True or False, got 128"),
    "transposed": ({"transposed": "x"}, '`transposed` must be None, True or False, got "x"'),
}


@pytest.mark.parametrize("form", [per_expert, packed])
@pytest.mark.parametrize("name", STATE_DICT)
def test_from_state_dict(form, name):
    options, message = STATE_DICT[name]
    tensors = form(random_layer("bf16", "swiglu", Sizes()))
    got = message_of(Experts.from_state_dict, tensors, **options)
    assert got == f"Experts.from_state_dict: {message}"


@pytest.mark.parametrize("name", SELECTION)
def test_from_linears(name):
    options, message = SELECTION[name]
    expert = nn.Module()
    expert.w1, expert.w3, expert.w2 = (nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(3))
    got = message_of(Experts.from_linears, [expert] * 4, **options)
    assert got == f"Experts.from_linears: {message}"


def test_from_linears_of_nothing():
    message = "Experts.from_linears: `experts` must be an iterable of modules, got NoneType"
    assert message_of(Experts.from_linears, None) == message


@pytest.mark.parametrize("prefix", ["", "model.layers.0.mlp.experts"])
def test_mxfp4_is_named(prefix):
    start = f"{prefix}." if prefix else ""
    tensors = {
        f"{start}{name}_{part}": torch.zeros(2, 64, *shape, dtype=torch.uint8)
        for name in ("gate_up_proj", "down_proj")
        for part, shape in (("blocks", (2, 16)), ("scales", (2,)))
    } | {f"{start}gate_up_proj_bias": torch.zeros(2, 64)}
    names = ", ".join(
        f'"{start}{name}_{part}"'
        for name in ("gate_up_proj", "down_proj")
        for part in ("blocks", "scales")
    )
    assert message_of(Experts.from_state_dict, tensors, prefix=prefix) == (
        "Experts.from_state_dict: `state_dict` must have weights in bfloat16, float16, float32 or "
        f"float8_e4m3fn, got MXFP4 ({names}), which is not supported: dequantise it to bfloat16 "
        "first"
    )
