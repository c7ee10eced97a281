"""Checkpoints that do not fit are refused, with what was expected and what came."""

from __future__ import annotations

import pytest
import torch
from moe_ext.nn import Experts
from support.fused_moe import Sizes, random_layer
from support.nn import packed, per_expert
from torch import nn

OP = "Experts.from_state_dict"
WIDE = Sizes(hidden=192, intermediate=256)


def tensors_of(form=per_expert, layout="bf16", sizes=None):
    return form(random_layer(layout, "swiglu", sizes or Sizes()))


def message_of(*arguments, **options):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Experts.from_state_dict(*arguments, **options)
    return str(error.value)


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def replaced(tensors, name, change):
    return tensors | {name: change(tensors[name])}


ALL_PARTS = "weight, bias, weight_scale_inv, weight_scale, input_scale, activation_scale"
PER_EXPERT = {
    "missing weight": (
        "bf16",
        lambda t: without(t, "3.up_proj.weight"),
        '`state_dict` must have "3.up_proj.weight", got "0.down_proj.weight", '
        '"0.gate_proj.weight", "0.up_proj.weight", "1.down_proj.weight" and 10 more',
    ),
    "missing expert": (
        "bf16",
        lambda t: {n: x for n, x in t.items() if not n.startswith("2")},
        '`state_dict` must have "2.gate_proj.weight", got "0.down_proj.weight", '
        '"0.gate_proj.weight", "0.up_proj.weight", "1.down_proj.weight" and 8 more',
    ),
    "wrong shape of up": (
        "bf16",
        lambda t: replaced(t, "1.up_proj.weight", lambda x: x[:-8]),
        "`1.up_proj.weight` must have shape (intermediate, hidden) = (96, 192), got (88, 192)",
    ),
    "wrong shape of down": (
        "bf16",
        lambda t: replaced(t, "4.down_proj.weight", lambda x: x.t()),
        "`4.down_proj.weight` must have shape (hidden, intermediate) = (192, 96), got (96, 192)",
    ),
    "one dimension": (
        "bf16",
        lambda t: replaced(t, "0.up_proj.weight", torch.flatten),
        "`0.up_proj.weight` must have two dimensions, got shape (18432,)",
    ),
    "mixed dtypes": (
        "bf16",
        lambda t: replaced(t, "2.down_proj.weight", torch.Tensor.float),
        "`2.down_proj.weight` must be bfloat16 to match `0.gate_proj.weight`, got float32",
    ),
    "wrong dtype": (
        "bf16",
        lambda t: {n: x.double() for n, x in t.items()},
        "`0.gate_proj.weight` must be bfloat16, float16, float32 or float8_e4m3fn, got float64",
    ),
    "unknown part": (
        "bf16",
        lambda t: t | {"1.up_proj.weight_zero_point": torch.zeros(1)},
        "`state_dict` must hold nothing of an expert but gate_proj, up_proj, down_proj with "
        f'{ALL_PARTS}, got "1.up_proj.weight_zero_point"',
    ),
    "no scale": (
        "channel",
        lambda t: without(t, "2.up_proj.weight_scale"),
        "`2.up_proj.weight_scale` must be there, since `2.up_proj.weight` is float8_e4m3fn, got "
        "none",
    ),
    "scale of bfloat16": (
        "bf16",
        lambda t: t | {"0.up_proj.weight_scale": torch.ones(1)},
        "`0.up_proj.weight_scale` must not be there unless `0.up_proj.weight` is float8_e4m3fn, "
        "got one",
    ),
    "shape of scale": (
        "segments",
        lambda t: replaced(t, "0.down_proj.weight_scale", lambda x: x.repeat(3, 1)),
        "`0.down_proj.weight_scale` must have shape () or (1,), (192,), (192, 1) or, for blocks of "
        "128 x 128, (2, 1), got (6, 1)",
    ),
    "mixed layouts": (
        "channel",
        lambda t: replaced(t, "1.up_proj.weight_scale", lambda x: x[0]),
        "`1.up_proj.weight` must have a scale per channel to match `0.gate_proj.weight`, got one "
        "per tensor",
    ),
    "one bias": (
        "bf16",
        lambda t: t | {"0.gate_proj.bias": torch.zeros(96)},
        "`0.up_proj.weight` must have a bias as `0.gate_proj.weight` has, got none",
    ),
    "another bias": (
        "bf16",
        lambda t: t | {"1.gate_proj.bias": torch.zeros(96)},
        "`1.gate_proj.weight` must have no bias, since `0.gate_proj.weight` has none, got one",
    ),
    "shape of bias": (
        "bf16",
        lambda t: t | {"0.gate_proj.bias": torch.zeros(95)},
        "`0.gate_proj.bias` must have shape (rows of the weight,) = (96,), got (95,)",
    ),
    "static scales of channels": (
        "channel",
        lambda t: t | {f"{n}.input_scale": torch.ones(1) for n in bases(t)},
        "`0.gate_proj.weight` must have no input scale unless its scale is per tensor, got one "
        "with a scale per channel",
    ),
    "both forms": (
        "bf16",
        lambda t: {"0.up_proj.weight": t["0.up_proj.weight"]} | tensors_of(packed),
        '`state_dict` must have experts packed or one by one, not both, got "0.up_proj.weight", '
        '"down_proj", "gate_up_proj"',
    ),
    "no expert": (
        "bf16",
        lambda t: {"gate.weight": torch.ones(1)},
        '`state_dict` must have "gate_up_proj" or "0.gate_proj.weight", got "gate.weight"',
    ),
    "nothing": (
        "bf16",
        lambda t: {},
        '`state_dict` must have "gate_up_proj" or "0.gate_proj.weight", got no names',
    ),
    "not a tensor": (
        "bf16",
        lambda t: t | {"0.up_proj.weight": [1.0]},
        "`0.up_proj.weight` must be a tensor, got list",
    ),
}


def bases(tensors):
    return {name.rpartition(".")[0] for name in tensors}


@pytest.mark.parametrize("name", PER_EXPERT)
def test_per_expert(name):
    layout, change, message = PER_EXPERT[name]
    assert message_of(change(tensors_of(per_expert, layout))) == f"{OP}: {message}"


PACKED = {
    "missing": (
        "bf16",
        lambda t: without(t, "down_proj"),
        '`state_dict` must have "down_proj", got "gate_up_proj"',
    ),
    "shape": (
        "bf16",
        lambda t: replaced(t, "down_proj", lambda x: x[..., :-8]),
        "`down_proj` must have shape (experts, hidden, intermediate) = (5, 192, 96), got (5, 192, "
        "88)",
    ),
    "number of experts": (
        "bf16",
        lambda t: replaced(t, "down_proj", lambda x: x[1:]),
        "`down_proj` must have shape (experts, hidden, intermediate) = (5, 192, 96), got (4, 192, "
        "96)",
    ),
    "two dimensions": (
        "bf16",
        lambda t: replaced(t, "gate_up_proj", lambda x: x[0]),
        "`gate_up_proj` must have three dimensions, got shape (192, 192)",
    ),
    "mixed dtypes": (
        "bf16",
        lambda t: replaced(t, "down_proj", torch.Tensor.half),
        "`down_proj` must be bfloat16 to match `gate_up_proj`, got float16",
    ),
    "bias": (
        "bf16",
        lambda t: t | {"gate_up_proj_bias": torch.zeros(5, 96)},
        "`gate_up_proj_bias` must have shape (experts, rows of the weight) = (5, 192), got (5, 96)",
    ),
    "experts of scale": (
        "channel",
        lambda t: replaced(t, "down_proj_scale_inv", lambda x: x[:4]),
        "`down_proj_scale_inv` must have 5 experts, got shape (4, 192)",
    ),
    "grids": (
        "segments",
        lambda t: replaced(t, "gate_up_proj_scale_inv", lambda x: x[..., :1]),
        "`gate_up_proj_scale_inv` must have shape of blocks = (5, 2, 1, 2), got (5, 2, 1, 1)",
    ),
    "no scale": (
        "block",
        lambda t: without(t, "down_proj_scale_inv"),
        "`down_proj_scale` must be there, since `down_proj` is float8_e4m3fn, got none",
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed(name):
    layout, change, message = PACKED[name]
    assert message_of(change(tensors_of(packed, layout))) == f"{OP}: {message}"


ARGUMENTS = {
    "extra experts": (
        (per_expert, "bf16"),
        {"num_experts": 4},
        "`state_dict` must have 4 experts (`num_experts`), got 5",
    ),
    "extra packed experts": (
        (packed, "bf16"),
        {"num_experts": 4},
        "`state_dict` must have 4 experts (`num_experts`), got 5",
    ),
    "past the end": (
        (per_expert, "bf16"),
        {"first_expert": 3, "num_local": 3},
        "`first_expert` and `num_local` must name experts among the 5 of `state_dict`, at least "
        "one, got 3 and 3",
    ),
    "none": (
        (packed, "bf16"),
        {"first_expert": 5},
        "`first_expert` and `num_local` must name experts among the 5 of `state_dict`, at least "
        "one, got 5 and None",
    ),
    "range": (
        (per_expert, "bf16"),
        {"intermediate_range": (64, 104)},
        "`intermediate_range` must be (begin, end) with 0 <= begin < end <= 96, the intermediate "
        "size, got (64, 104)",
    ),
    "size of the range": (
        (per_expert, "bf16"),
        {"intermediate_range": (0, 36)},
        "the intermediate size must be a multiple of 8, got 36",
    ),
    "inside a block": (
        (per_expert, "segments", WIDE),
        {"intermediate_range": (64, 256)},
        "`intermediate_range` must begin at a multiple of 128 where scales are per block, got (64, "
        "256); `pad_blocks=True` puts 64 features of zeros in front",
    ),
    "shared blocks": (
        (packed, "block"),
        {"intermediate_range": (0, 48), "pad_blocks": True},
        "`intermediate_range` must be None where gate and up share blocks of 128 x 128 "
        "(intermediate size 96), got (0, 48)",
    ),
    "quantize": (
        (per_expert, "bf16"),
        {"quantize": "row"},
        '`quantize` must be None or one of "block", "channel", "tensor", got "row"',
    ),
    "quantize FP8": (
        (per_expert, "channel"),
        {"quantize": "block"},
        '`quantize` must be None where the weights are float8_e4m3fn already, got "block"',
    ),
    "interleaved": (
        (per_expert, "bf16"),
        {"gate_up_layout": "interleaved"},
        '`gate_up_layout` must be "concatenated" where gate and up have weights of their own, got '
        '"interleaved"',
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    made, arguments, message = ARGUMENTS[name]
    assert message_of(tensors_of(*made), **arguments) == f"{OP}: {message}"


def test_bad_options_are_found_before_anything_is_read():
    tensors = tensors_of()
    message = 'Experts: `activation` must be one of "swiglu", "swiglu_oai", "geglu", '
    message += '"geglu_tanh", "relu2", "silu", got "gelu"'
    assert message_of(tensors, activation="gelu", consume=True) == message
    assert len(tensors) == 15
    with pytest.raises(TypeError, match="'activations'"):
        Experts.from_state_dict(tensors, activations="swiglu")


def test_what_is_consumed_must_be_a_mutable_mapping():
    assert message_of([1]) == f"{OP}: `state_dict` must be a mapping of names to tensors, got list"


class Linears(nn.Module):
    """An expert with some of its linears."""

    def __init__(self, **shapes):
        super().__init__()
        for name, (rows, columns) in shapes.items():
            self.add_module(name, nn.Linear(columns, rows, bias=False))


LINEARS = {
    "missing": (
        [Linears(w1=(16, 32), w3=(16, 32))],
        '`experts` must have "0.w2.weight", got "0.w1.weight", "0.w3.weight"',
    ),
    "shape": (
        [Linears(w1=(16, 32), w3=(16, 32), w2=(32, 16)), Linears(w1=(16, 40), w3=(16, 32))],
        '`experts` must have "1.w2.weight", got "0.w1.weight", "0.w2.weight", "0.w3.weight", '
        '"1.w1.weight" and 1 more',
    ),
    "module": ([torch.zeros(1)], "`experts` must hold modules, got Tensor at 0"),
    "none": ([], "`experts` must hold modules of linears, got no names"),
}


@pytest.mark.parametrize("name", LINEARS)
def test_linears(name):
    experts, message = LINEARS[name]
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Experts.from_linears(experts)
    assert str(error.value) == f"Experts.from_linears: {message}"
