"""What `ExpertBank` and `fused_moe_mixed` refuse, and in which words."""

from __future__ import annotations

import pytest
import torch
from moe_ext.nn import Experts
from moe_ext.precision import ExpertBank, LayerPlan, fused_moe_mixed
from support.bank import BASE, PLANS, layer_of, quantized, with_scales

EXPERTS, INPUTS, _ = layer_of()
FP8 = quantized(EXPERTS, "block")
BANK = ExpertBank.from_experts(PLANS["all four"], bf16=EXPERTS)


def message_of(function, *arguments, **options):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        function(*arguments, **options)
    return str(error.value)


CONSTRUCTOR = {
    "plan": ({"plan": 3}, "ExpertBank: `plan` must be a LayerPlan, got 3"),
    "sizes": (
        {"hidden_size": 12},
        "ExpertBank: `hidden_size` must be a positive int, a multiple of 8, got 12",
    ),
    "bias": ({"bias": 1}, "ExpertBank: `bias` must be True or False, got 1"),
    "static": (
        {"static_scales": True},
        "ExpertBank: `static_scales` must be False unless both stages have scales per "
        "\"tensor\", got True with 'block' and 'block'",
    ),
    "unknown": (
        {"experts": 3},
        "ExpertBank: an option must be one of activation, alpha, limit, gate_up_layout, "
        "apply_router_weight_on_input, first_expert, routed_scale, accumulate, batch_invariant, "
        'got "experts"',
    ),
    "option": (
        {"activation": "gelu"},
        'Experts: `activation` must be one of "swiglu", "swiglu_oai", "geglu", "geglu_tanh", '
        '"relu2", "silu", got "gelu"',
    ),
    "accumulate": (
        {"accumulate": "fast"},
        'Experts: `accumulate` must be "promoted" (the default) with scales per block, which '
        'every sum of 128 is multiplied by, got "fast"',
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTOR)
def test_constructor(name):
    options, message = CONSTRUCTOR[name]
    sizes = {"plan": BASE, "hidden_size": 64, "intermediate_size": 32}
    assert message_of(ExpertBank, **(sizes | options)) == message


def experts_like(**changes):
    return Experts(6, 192, 96, **changes)


FROM_EXPERTS = {
    "plan": ({"plan": None}, "`plan` must be a LayerPlan, got None"),
    "nothing": ({}, "`bf16` must be Experts where there is no `fp8`, got None"),
    "no experts": ({"bf16": [1]}, "`bf16` must be None or Experts, got [1]"),
    "dtype": ({"bf16": FP8}, "`bf16` must have weights in bfloat16, got float8_e4m3fn"),
    "other dtype": ({"fp8": EXPERTS}, "`fp8` must have weights in float8_e4m3fn, got bfloat16"),
    "chosen": (
        {"plan": PLANS["all four"], "fp8": FP8},
        "`bf16` must be Experts for a plan with 3 experts in BF16, got None",
    ),
    "count": (
        {"plan": LayerPlan(5), "bf16": EXPERTS},
        "`bf16` must have 5 experts, got 6",
    ),
    "chosen count": (
        {"plan": PLANS["all four"], "fp8": FP8, "bf16": Experts(2, 192, 96)},
        "`bf16` must have 6 experts, or the 3 that have a stage in BF16, got 2",
    ),
    "fp8 count": (
        {"plan": LayerPlan(5), "fp8": FP8},
        "`fp8` must have 5 experts, as the plan, got 6",
    ),
    "scales": (
        {"plan": with_scales(BASE, "tensor"), "fp8": FP8},
        "`fp8` must have scales per tensor in gate_up, as the plan, got scales per block",
    ),
    "sizes": (
        {"fp8": FP8, "bf16": Experts(6, 192, 64)},
        "`bf16` must have the sizes of `fp8`, (192, 96), got (192, 64)",
    ),
    "biases": (
        {"fp8": FP8, "bf16": experts_like(bias=True)},
        "`bf16` must have the biases of `fp8`, False, got True",
    ),
    "options": (
        {"fp8": FP8, "bf16": experts_like(routed_scale=2.0)},
        "`bf16` must have the `routed_scale` of `fp8`, 1.0, got 2.0",
    ),
}


@pytest.mark.parametrize("name", FROM_EXPERTS)
def test_from_experts(name):
    options, message = FROM_EXPERTS[name]
    assert message_of(ExpertBank.from_experts, **({"plan": BASE} | options)) == (
        f"ExpertBank.from_experts: {message}"
    )


def test_experts_that_the_plan_has_in_bf16_need_no_scales_of_their_own():
    plan = with_scales(BASE, "tensor").with_bf16()
    assert ExpertBank.from_experts(plan, fp8=FP8, bf16=EXPERTS).w13_fp8 is None


HIDDEN, WEIGHTS, IDS = INPUTS
CALL = {
    "no tensor": (
        {"hidden_states": None},
        "ExpertBank: `hidden_states` must be a tensor, got None",
    ),
    "leading": (
        {"topk_ids": IDS[:3]},
        "ExpertBank: `topk_ids` must have the leading dimensions (21,) of `hidden_states`, got "
        "shape (3, 3)",
    ),
    "dtype": (
        {"hidden_states": HIDDEN.float()},
        "fused_moe_mixed: `hidden_states` must be bfloat16, got float32",
    ),
    "ids": (
        {"topk_ids": IDS.float()},
        "fused_moe_mixed: `topk_ids` must be int32 or int64, got float32",
    ),
    "top_k": (
        {"topk_weights": WEIGHTS[:, :2]},
        "fused_moe_mixed: `topk_weights` must have the shape (21, 3) of `topk_ids`, got (21, 2)",
    ),
    "addend": (
        {"addend": torch.zeros(21, 192).half()},
        "fused_moe_mixed: `addend` must be bfloat16 or float32, got float16",
    ),
    "map": (
        {"expert_map": torch.zeros(6)},
        "fused_moe_mixed: `expert_map` must be int32, got float32",
    ),
    "workspace": (
        {"workspace": torch.empty(8, dtype=torch.uint8)},
        f"fused_moe_mixed: `workspace` must have at least {BANK.workspace_size(21, 3)} bytes "
        "(ExpertBank.workspace_size), got 8",
    ),
    "out": (
        {"out": torch.empty(21, 192)},
        "fused_moe_mixed: `out` must be bfloat16 to match `hidden_states`, got float32",
    ),
}


@pytest.mark.parametrize("name", CALL)
def test_call(name):
    options, message = CALL[name]
    given = {"hidden_states": HIDDEN, "topk_weights": WEIGHTS, "topk_ids": IDS}
    assert message_of(BANK, **(given | options)) == message


def test_rows_of_another_size():
    assert message_of(fused_moe_mixed, HIDDEN[:, :64], BANK, WEIGHTS, IDS) == (
        "fused_moe_mixed: `hidden_states` must have shape (num_tokens, hidden) = (*, 192), got "
        "(21, 64)"
    )


def test_another_device():
    hidden, weights, ids = (tensor.to("meta") for tensor in INPUTS)
    assert message_of(BANK, hidden, weights, ids) == (
        "fused_moe_mixed: `hidden_states` must be on cpu, where `bank` is, got meta"
    )


def test_a_bank_of_one_precision_speaks_as_fused_moe():
    bank = ExpertBank.from_experts(BASE, bf16=EXPERTS)
    assert message_of(bank, HIDDEN.float(), WEIGHTS, IDS) == (
        "fused_moe: `hidden_states` must be bfloat16, got float32"
    )
