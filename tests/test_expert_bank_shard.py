"""`ExpertBank.shard`: ranks whose results add up to the whole, and cuts that are not exact."""

from __future__ import annotations

import pytest
import torch
from moe_ext.precision import ExpertBank, LayerPlan, fused_moe_mixed_reference
from support.bank import FORMS, PLANS, layer_of, quantized, with_scales
from support.fused_moe import Sizes
from support.tolerance import assert_same_bits, dissimilarity

# Ranges that end anywhere and begin at blocks of 128 (64 features of gate and up interleaved).
SIZES = Sizes(num_tokens=13, num_experts=6, top_k=3, hidden=192, intermediate=320)
RANGES = ((0, 128), (128, 256), (256, 320))


def bank_of(form="plain", name="all four", sizes=SIZES):
    experts, inputs, scales = layer_of(form, sizes)
    return ExpertBank.from_experts(with_scales(PLANS[name], scales), bf16=experts), inputs


def exact(bank, inputs):
    return fused_moe_mixed_reference(inputs[0], bank, *inputs[1:], out_dtype=torch.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["all four", "by expert", "down of all"])
def test_ranks_of_features_add_up(form, name):
    bank, inputs = bank_of(form, name)
    parts = [bank.shard(intermediate_range=part) for part in RANGES]
    assert [part.intermediate_size for part in parts] == [128, 128, 64]
    whole = exact(bank, inputs)
    # Scales of a row of the intermediate are of the rank's features.
    limit = 1e-5 if form in ("plain", "interleaved with biases", "ungated", "on input") else 2e-3
    assert dissimilarity(sum(exact(part, inputs) for part in parts), whole) < limit


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PLANS)
def test_ranks_of_experts_add_up(form, name):
    bank, inputs = bank_of(form, name)
    parts = [
        bank.shard(num_local=2),
        bank.shard(first_expert=2, num_local=3),
        bank.shard(first_expert=5),
    ]
    assert [(part.first_expert, part.num_experts) for part in parts] == [(0, 2), (2, 3), (5, 1)]
    total = sum(exact(part, inputs) for part in parts)
    torch.testing.assert_close(total, exact(bank, inputs), rtol=1e-5, atol=1e-5)
    for part in parts:
        assert_same_bits(part(*inputs), exact(part, inputs).bfloat16())


def test_a_shard_of_a_shard():
    bank, inputs = bank_of()
    part = bank.shard(first_expert=1, num_local=4).shard(first_expert=3, num_local=2)
    once = bank.shard(first_expert=3, num_local=2)
    assert part.plan == once.plan == bank.plan.of_experts(3, 2)
    assert_same_bits(part(*inputs), once(*inputs))
    both = bank.shard(first_expert=3, num_local=2, intermediate_range=(128, 256))
    again = once.shard(intermediate_range=(128, 256))
    assert_same_bits(both(*inputs), again(*inputs))


def test_a_shard_is_a_copy_without_what_belongs_to_others():
    bank, inputs = bank_of("interleaved with biases")
    part = bank.shard(first_expert=1, num_local=2)
    assert part.w13_bf16 is part.w2_bf16 is None  # experts 1 and 2 are in FP8
    before = part(*inputs)
    for parameter in bank.parameters():
        parameter.data.view(torch.uint8).zero_()
    assert_same_bits(part(*inputs), before)


def test_the_bias_of_down_is_with_the_rank_that_begins_at_0():
    bank, _ = bank_of("interleaved with biases")
    first, second = (bank.shard(intermediate_range=part) for part in RANGES[:2])
    assert first.w2_fp8_bias.shape == bank.w2_fp8_bias.shape
    assert second.w2_fp8_bias is second.w2_bf16_bias is None
    assert second.w13_fp8_bias.shape == (4, 256)


def test_a_cut_that_leaves_gate_and_up_with_grids_apart():
    bank, _ = bank_of(sizes=Sizes(13, 6, 3, 192, 256))
    assert bank.w13_fp8_scale.dim() == 3
    part = bank.shard(intermediate_range=(0, 192))
    assert part.w13_fp8_scale.shape == (4, 2, 2, 2)
    assert bank.shard(intermediate_range=(128, 256)).w13_fp8_scale.shape == (4, 2, 2)


def test_static_scales_go_with_every_rank():
    experts, _, _ = layer_of("tensor", SIZES)
    plan = with_scales(PLANS["all four"], "tensor")
    bank = ExpertBank(plan, 192, 320, static_scales=True)
    bank.a1_scale.fill_(0.5)
    bank.a2_scale.fill_(0.25)
    part = bank.shard(num_local=1, intermediate_range=(0, 8))
    assert (part.a1_scale.item(), part.a2_scale.item()) == (0.5, 0.25)
    assert experts.a1_scale is None


def refused(bank, **options):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        bank.shard(**options)
    return str(error.value)


def test_what_is_refused():
    bank, _ = bank_of()
    assert refused(bank, first_expert=6) == (
        "ExpertBank.shard: `first_expert` and `num_local` must name experts among 0 to 5, at least "
        "one, got 6 and None"
    )
    assert refused(bank, num_local=0).endswith("at least one, got 0 and 0")
    assert refused(bank, first_expert="1") == (
        'ExpertBank.shard: `first_expert` must be None or an int, got "1"'
    )
    assert refused(bank, intermediate_range=(0, 328)) == (
        "ExpertBank.shard: `intermediate_range` must be (begin, end) with 0 <= begin < end <= 320, "
        "the intermediate size, a multiple of 8 apart, got (0, 328)"
    )
    assert refused(bank, intermediate_range=(0, 20)).endswith("got (0, 20)")
    assert refused(bank, intermediate_range=(64, 128)) == (
        "ExpertBank.shard: `intermediate_range` must begin at a multiple of 128 where scales are "
        "per block, got (64, 128)"
    )
    assert refused(bank, intermediate_range=128) == (
        "ExpertBank.shard: `intermediate_range` must be None or (begin, end), two ints, got 128"
    )
    interleaved, _ = bank_of("interleaved with biases", "gate_up of all")
    # Here the blocks of down decide.
    assert "multiple of 128" in refused(interleaved, intermediate_range=(64, 128))
    down, _ = bank_of("interleaved with biases", "down of all")
    assert "multiple of 64" in refused(down, intermediate_range=(32, 128))
    assert down.shard(intermediate_range=(64, 128)).intermediate_size == 64


def test_cuts_anywhere_without_blocks():
    for form in ("channel", "tensor"):
        bank, _ = bank_of(form)
        assert bank.shard(intermediate_range=(8, 24)).intermediate_size == 16
    experts, _, _ = layer_of(sizes=SIZES)
    bf16 = ExpertBank.from_experts(LayerPlan(6).with_bf16(), bf16=experts)
    assert bf16.shard(intermediate_range=(8, 24)).intermediate_size == 16


def test_gate_and_up_that_share_blocks_cannot_be_cut():
    experts, inputs, _ = layer_of(sizes=SIZES)
    fp8 = quantized(experts, "block")
    assert fp8.w13_scale.shape == (6, 2, 3, 2)
    fp8.w13_scale = torch.rand(6, 5, 2)  # one grid over 640 rows
    bank = ExpertBank.from_experts(LayerPlan(6), fp8=fp8)
    assert_same_bits(bank(*inputs), fp8(*inputs))
    assert refused(bank, intermediate_range=(0, 128)) == (
        "ExpertBank.shard: `intermediate_range` must be None where gate and up share blocks of "
        "128 x 128 (intermediate size 320), got (0, 128)"
    )
    part = bank.shard(first_expert=2)
    assert_same_bits(part.w13_fp8_scale, fp8.w13_scale[2:])
