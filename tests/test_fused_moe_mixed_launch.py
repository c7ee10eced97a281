"""What Python decides of a CUDA call of `fused_moe_mixed`, with a stand-in for the C++ op."""

from __future__ import annotations

import types

import pytest
import torch
from moe_ext._activations import gating, resolved
from moe_ext._configs import all_configs
from moe_ext.precision import (
    ExpertBank,
    _mixed_run,
    fused_moe_mixed,
    fused_moe_mixed_reference,
)
from moe_ext.precision._mixed_kernels import NONE, choose_mixed_kernels
from moe_ext.precision._mixed_layer import OPERANDS
from moe_ext.precision._mixed_layer import layer_of as operands_of
from moe_ext.precision._slots import PAIRS as PARTS
from moe_ext.precision._slots import parts_of, slots_of
from support.bank import FORMS, PAIRS, PLANS, integer_bank, layer_of, plan_of_pairs, with_scales
from support.fused_moe import Sizes
from support.tolerance import assert_same_bits
from test_fused_moe_launch import REMEMBER, OnCuda

NAMES = (
    *("hidden_states", "topk_weights", "topk_ids", *OPERANDS[:-1]),
    *("expert_map", "addend", "workspace", "out", "num_fp8", "flags", "alpha", "limit"),
    *("routed_scale", "first_expert", "kernels", "gating"),
)


class Kernels(types.SimpleNamespace):
    """A stand-in for the C++ op: runs a problem that it was told a choice for."""

    def __init__(self, bank):
        super().__init__(sm_count=132, bank=bank, told={}, ran=[], refused=0)

    def fused_moe_mixed_launch(self, *arguments):
        call = dict(zip(NAMES, arguments, strict=True))
        problem = (call["topk_ids"].shape, call["flags"] & ~REMEMBER)
        choice = (call["kernels"], call["gating"])
        if choice == ((), ()):
            choice = self.told.get(problem)
        if choice is None or call["topk_ids"].numel() == 0:
            self.refused += 1
            raise ValueError("fused_moe_mixed: not the documented message")
        if call["flags"] & REMEMBER:
            self.told[problem] = choice
        self.ran.append((call, choice))
        plain = call["hidden_states"].as_subclass(torch.Tensor)
        result = fused_moe_mixed_reference(
            plain,
            self.bank,
            call["topk_weights"],
            call["topk_ids"],
            addend=call["addend"],
            expert_map=call["expert_map"],
        )
        return result if call["out"] is None else call["out"].copy_(result)


@pytest.fixture
def bank_on_cuda(monkeypatch):
    bank, (hidden, *routing) = integer_bank(
        "channel", plan_of_pairs(8, PAIRS), Sizes(9, 8, 3, 128, 64), first_expert=2
    )
    kernels = Kernels(bank)
    monkeypatch.setattr(_mixed_run, "device_kernels", lambda index: kernels)
    return bank, (hidden.as_subclass(OnCuda), *routing), kernels


def run(bank, inputs, **options):
    layer = operands_of(bank)
    choices = {name: getattr(layer, name) for name in layer._fields[len(OPERANDS) :]}
    operands = layer[: len(OPERANDS)]
    return _mixed_run.run_fused_moe_mixed(*inputs, *operands, **choices, **options)


def test_a_problem_is_refused_once_and_then_remembered(bank_on_cuda):
    bank, inputs, kernels = bank_on_cuda
    first, second = run(bank, inputs), run(bank, inputs)
    assert_same_bits(first, second)
    (told, choice), (again, remembered) = kernels.ran
    assert kernels.refused == 1
    assert remembered == choice
    assert again["kernels"] == again["gating"] == ()
    assert told["flags"] == again["flags"] | REMEMBER
    assert choice[0] == choose_mixed_kernels(operands_of(bank), 27, 132)
    assert choice[1] == tuple(gating("swiglu", *resolved("swiglu", None, None)))
    assert told["num_fp8"] == 2
    assert told["first_expert"] == 2
    for name in OPERANDS[:-1]:
        assert told[name] is getattr(operands_of(bank), name)


def test_an_expert_map_takes_the_place_of_the_first_id(bank_on_cuda):
    bank, inputs, kernels = bank_on_cuda
    table = torch.arange(8, dtype=torch.int32)
    run(bank, inputs, expert_map=table)
    assert kernels.ran[-1][0]["first_expert"] == 0
    assert kernels.ran[-1][0]["expert_map"] is table


def test_memory_of_the_caller(bank_on_cuda):
    bank, inputs, kernels = bank_on_cuda
    out, workspace = torch.zeros(9, 128).bfloat16(), torch.empty(10**6, dtype=torch.uint8)
    assert run(bank, inputs, out=out, workspace=workspace) is out
    assert kernels.ran[-1][0]["workspace"] is workspace


def test_no_tokens_launch_nothing(bank_on_cuda):
    bank, inputs, kernels = bank_on_cuda
    assert run(bank, tuple(tensor[:0] for tensor in inputs)).shape == (0, 128)
    assert kernels.ran == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"addend": torch.zeros(3, 128)}, "`addend` must have shape"),
        ({"workspace": torch.empty(8)}, "`workspace` must have at least"),
        ({"expert_map": torch.zeros(8)}, "`expert_map` must be int32, got float32"),
    ],
)
def test_what_is_wrong_is_said_by_the_checks(bank_on_cuda, changes, message):
    bank, inputs, kernels = bank_on_cuda
    with pytest.raises(ValueError, match=f"^fused_moe_mixed: {message}"):
        run(bank, inputs, **changes)
    assert kernels.ran == []


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("routed_scale", float("nan"), "`routed_scale` must be finite"),
        ("activation", "gelu", "`activation` must be one of"),
        ("limit", -1.0, "`limit` must be positive, got -1.0"),
    ],
)
def test_options_set_later_are_checked(bank_on_cuda, option, value, message):
    bank, inputs, _ = bank_on_cuda
    setattr(bank, option, value)
    with pytest.raises(ValueError, match=f"^fused_moe_mixed: {message}"):
        run(bank, inputs)


@pytest.mark.parametrize("name", ["hidden_states", "bank", "topk_weights", "topk_ids"])
def test_what_is_missing_is_named(name):
    bank, inputs = integer_bank("channel", plan_of_pairs(8, PAIRS), Sizes(9, 8, 3, 128, 64))
    given = dict(zip(("hidden_states", "topk_weights", "topk_ids"), inputs, strict=True))
    given |= {"bank": bank, name: None}
    kind = "an ExpertBank, got NoneType" if name == "bank" else "a tensor, got None"
    with pytest.raises(ValueError, match=f"^fused_moe_mixed: `{name}` must be {kind}$"):
        fused_moe_mixed(**given)


def test_other_experts_are_no_bank():
    experts, inputs, _ = layer_of()
    with pytest.raises(ValueError, match="`bank` must be an ExpertBank, got Experts"):
        fused_moe_mixed(inputs[0], experts, *inputs[1:])


# kernels


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("num_tokens", [1, 64, 4096])
def test_kernels_are_of_their_precision_and_stage(num_tokens, name, form, batch_invariant):
    experts, _, scales = layer_of(form)
    experts.batch_invariant = batch_invariant
    layer = operands_of(ExpertBank.from_experts(with_scales(PLANS[name], scales), bf16=experts))
    kernels = choose_mixed_kernels(layer, 3 * num_tokens, 132)
    weights = (layer.w13_fp8, layer.w13_bf16, layer.w2_fp8, layer.w2_bf16)
    for index, (kernel, weight) in enumerate(zip(kernels, weights, strict=True)):
        if weight is None:
            assert kernel == NONE
            continue
        config = all_configs()[kernel]
        assert config.dtype == ("bf16" if index % 2 else "fp8")
        assert config.output in (("gated", "either") if index < 2 else ("rows", "either"))
        assert config.split_k == 1 or not batch_invariant


# parts


def test_places_keep_the_experts_of_a_stage_together():
    for size in (1, 2, 5, 8, 40):
        for pairs in (PAIRS, PAIRS[1:], PAIRS[:2], PAIRS[2:], PAIRS[1:3]):
            plan = plan_of_pairs(size, pairs)
            bank = ExpertBank(plan, 64, 32)
            order = bank.places.argsort().tolist()
            kinds = [tuple(plan[e, s].kind for s in ("gate_up", "down")) for e in order]
            assert [PARTS.index(own) for own in kinds] == sorted(map(PARTS.index, kinds))
            for part in parts_of(plan):
                own = order[part.place : part.place + part.num_experts]
                assert own == sorted(own)
                stages = zip(("gate_up", "down"), part.kinds, part.begins, strict=True)
                for stage, kind, begin in stages:
                    end = begin + part.num_experts
                    assert list(slots_of(plan)[stage, kind][begin:end]) == own
            assert sum(part.num_experts for part in parts_of(plan)) == size
            assert operands_of(bank).counts == tuple(kinds.count(pair) for pair in PARTS)
