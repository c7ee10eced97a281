"""Layers, plans of all kinds of mixtures, and experts in both precisions, for banks of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from moe_ext.nn import Experts
from moe_ext.precision import ExpertBank, LayerPlan
from torch import Tensor

from support.fused_moe import Sizes, integer_layer, random_layer
from support.nn import experts_of, inputs_of

SIZES = Sizes(num_tokens=21, num_experts=6, top_k=3, hidden=192, intermediate=96)
BASE = LayerPlan(6)
PLANS = {
    "by expert": BASE.with_bf16(experts=(1, 4)),
    "down of all": BASE.with_bf16(stages="down"),
    "gate_up of all": BASE.with_bf16(stages="gate_up"),
    "all four": BASE.with_bf16(experts=(0, 3), stages="down")
    .with_bf16(experts=3)
    .with_bf16(experts=5, stages="gate_up"),
    "one stage": BASE.with_bf16(experts=2, stages="down"),
    "but one stage": BASE.with_bf16().with_fp8(experts=2, stages="gate_up"),
}
FORMS = {
    "plain": {},
    "channel": {"scales": "channel"},
    "tensor": {"scales": "tensor"},
    "interleaved with biases": {
        "activation": "swiglu_oai",
        "gate_up_layout": "interleaved",
        "bias": True,
    },
    "ungated": {"activation": "relu2"},
    "on input": {"apply_router_weight_on_input": True, "routed_scale": 1.5},
}


PAIRS = tuple((gate_up, down) for gate_up in ("fp8", "bf16") for down in ("fp8", "bf16"))


def plan_of_pairs(num_experts: int, pairs: Sequence[tuple[str, str]]) -> LayerPlan:
    """A plan whose experts have these precisions of gate_up and down, in turn."""
    plan = LayerPlan(num_experts)
    for index, stage in enumerate(("gate_up", "down")):
        chosen = [e for e in range(num_experts) if pairs[e % len(pairs)][index] == "bf16"]
        plan = plan.with_bf16(experts=chosen, stages=stage) if chosen else plan
    return plan


def integer_bank(
    layout: str,
    plan: LayerPlan,
    sizes: Sizes,
    device: str = "cpu",
    seed: int = 1,
    **changes: object,
) -> tuple[ExpertBank, tuple[Tensor, Tensor, Tensor]]:
    """A bank whose every step is exact, as `integer_layer` has them, and its inputs.

    Its experts in BF16 are others than those in FP8, so that a wrong precision shows.
    """
    made: dict[str, Experts] = {}
    scales = {"expert": "tensor", "channel": "channel", "segments": "block"}[layout]
    if scales == "block" and sizes.intermediate % 128 == 0:
        layout = "block"  # the same grid, in as many dimensions as `Experts` have it
    inputs = inputs_of(integer_layer(layout, sizes, seed=seed))
    for kind, own, shift in (("fp8", layout, 0), ("bf16", "bf16", 1000)):
        layer = integer_layer(own, sizes, seed=seed + shift)
        shape = layer["w2"].shape[:2]
        generator = torch.Generator().manual_seed(seed + shift)
        layer["w2_bias"] = torch.randint(-4, 5, shape, generator=generator).float()
        made[kind] = experts_of(layer, **changes)
    bank = ExpertBank.from_experts(with_scales(plan, scales), **made)
    return bank.to(device), tuple(tensor.to(device) for tensor in inputs)


def layer_of(
    form: str = "plain", sizes: Sizes = SIZES
) -> tuple[Experts, tuple[Tensor, Tensor, Tensor], str]:
    """Experts in BF16 with their inputs, and the layout of scales."""
    options = dict(FORMS[form])
    scales, bias = options.pop("scales", "block"), options.pop("bias", False)
    layer = random_layer("bf16", options.pop("activation", "swiglu"), sizes)
    if bias:
        layer |= {
            "w13_bias": torch.randn(layer["w13"].shape[:2]).bfloat16(),
            "w2_bias": torch.randn(layer["w2"].shape[:2]).bfloat16(),
        }
    return experts_of(layer, **options), inputs_of(layer), scales


def quantized(experts: Experts, scales: str) -> Experts:
    """The same experts in FP8, as a checkpoint has them."""
    tensors = {"gate_up_proj": experts.w13, "down_proj": experts.w2}
    if experts.activation == "relu2":
        tensors["up_proj"] = tensors.pop("gate_up_proj")
    if experts.w13_bias is not None:
        tensors |= {"gate_up_proj_bias": experts.w13_bias, "down_proj_bias": experts.w2_bias}
    options = experts._choices()
    assert options.pop("first_expert") == 0
    return Experts.from_state_dict(tensors, quantize=scales, **options)


def with_scales(plan: LayerPlan, scales: str) -> LayerPlan:
    """The plan with other scales for what is in FP8."""
    return plan.with_fp8(experts=(), scales=scales)
