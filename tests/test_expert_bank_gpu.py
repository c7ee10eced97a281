"""Banks of experts on a GPU: the same as the reference, without a host in the loop."""

from __future__ import annotations

import pytest
import torch
from moe_ext.precision import (
    ExpertBank,
    calibrate,
    fused_moe_mixed_reference,
    plan_precision,
    realistic_layer,
)
from support.bank import BASE, FORMS, PLANS, layer_of, quantized, with_scales
from support.fused_moe import MAX_DISSIMILARITY_BY_TIES, Sizes
from support.tolerance import assert_same_bits, dissimilarity

pytestmark = pytest.mark.gpu
SIZES = Sizes(num_tokens=130, num_experts=6, top_k=3, hidden=384, intermediate=256)


def bank_of(form, name, **options):
    experts, inputs, scales = layer_of(form, SIZES)
    for option, value in options.items():
        setattr(experts, option, value)
    bank = ExpertBank.from_experts(with_scales(PLANS[name], scales), bf16=experts)
    return bank.to("cuda"), tuple(tensor.to("cuda") for tensor in inputs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_a_bank_of_one_precision_is_fused_moe(form, kind):
    experts, inputs, scales = layer_of(form, SIZES)
    uniform = experts if kind == "bf16" else quantized(experts, scales)
    plan = with_scales(BASE, scales)
    bank = ExpertBank.from_experts(plan.with_bf16() if kind == "bf16" else plan, bf16=experts)
    inputs = [tensor.to("cuda") for tensor in inputs]
    assert_same_bits(bank.to("cuda")(*inputs), uniform.to("cuda")(*inputs))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PLANS)
def test_a_mixture_is_that_of_the_reference(form, name):
    bank, inputs = bank_of(form, name)
    addend = torch.randn(130, 384, device="cuda")
    out = bank(*inputs, addend=addend)
    expected = fused_moe_mixed_reference(
        inputs[0], bank, *inputs[1:], addend=addend, out_dtype=torch.float32
    )
    assert dissimilarity(out, expected) < MAX_DISSIMILARITY_BY_TIES
    assert_same_bits(bank(*inputs, addend=addend), out)


@pytest.mark.parametrize("name", ["by expert", "all four"])
def test_no_tokens_and_an_expert_map(name):
    bank, inputs = bank_of("plain", name)
    assert bank(*(tensor[:0] for tensor in inputs)).shape == (0, 384)
    table = torch.tensor([2, -1, 5, 0, 9, 4, 1, 3], dtype=torch.int32, device="cuda")
    hidden, weights, ids = inputs
    expected = bank(hidden, weights, table.long()[ids])
    assert_same_bits(bank(hidden, weights, ids, expert_map=table), expected)


def test_calibration_is_that_of_the_cpu():
    layer = realistic_layer(32, 256, 128, top_k=4, super_experts=2)
    tokens = layer.tokens(512)
    of_cpu = calibrate(layer.experts(), [tuple(tokens)])
    of_cuda = calibrate(
        layer.experts(device="cuda"), [tuple(tensor.to("cuda") for tensor in tokens)]
    )
    ratio = of_cuda.layers["experts"].error / of_cpu.layers["experts"].error
    assert bool(((ratio - 1).abs() < 0.05).all())
    plans = [plan_precision(stats, byte_budget=0.1) for stats in (of_cpu, of_cuda)]
    for planned in plans:
        first = {(c.expert, c.stage) for c in planned.choices[:4]}
        assert first == set(layer.planted)
