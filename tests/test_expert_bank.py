"""`ExpertBank` and `fused_moe_mixed`: what a mixture computes, pinned expert by expert."""

from __future__ import annotations

import copy

import moe_ext
import pytest
import torch
from moe_ext.nn import Experts, MoELayer
from moe_ext.precision import ExpertBank, fused_moe_mixed, fused_moe_mixed_reference
from moe_ext.precision.layer_plan import STAGES
from moe_ext.reference import fused_moe_reference
from support.bank import BASE, FORMS, PLANS, layer_of, quantized, with_scales
from support.fused_moe import Sizes
from support.tolerance import assert_same_bits, dissimilarity


def row_by_row(bank_plan, bf16, fp8, inputs, addend=None):
    """The mixture in plain words: every slot by itself, stage by stage, through one expert."""
    hidden, weights, ids = inputs
    out = torch.zeros(hidden.shape)
    for token, choices in enumerate(ids.tolist()):
        for j, expert in enumerate(choices):
            if not 0 <= expert < bank_plan.num_experts:
                continue
            tensors = {}
            for stage, name in (("gate_up", "w13"), ("down", "w2")):
                source = bf16 if bank_plan[expert, stage].kind == "bf16" else fp8
                for part in (name, f"{name}_bias", f"{name}_scale"):
                    tensor = getattr(source, part)
                    tensors[part] = None if tensor is None else tensor[expert : expert + 1]
            options = {
                name: value
                for name, value in bf16._choices().items()
                if name not in ("accumulate", "batch_invariant", "first_expert", "routed_scale")
            }
            on_input = options["apply_router_weight_on_input"]
            factor = weights[token : token + 1, j : j + 1].float()
            row = fused_moe_reference(
                hidden[token : token + 1],
                tensors.pop("w13"),
                tensors.pop("w2"),
                factor if on_input else torch.ones(1, 1),
                torch.zeros(1, 1, dtype=torch.int64),
                **tensors,
                **options,
                out_dtype=torch.float32,
            )
            out[token] += row[0] if on_input else row[0] * factor[0, 0]
    out = out * bf16.routed_scale
    return out if addend is None else out + addend


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_a_bank_of_one_precision_is_fused_moe(form, kind):
    experts, inputs, scales = layer_of(form)
    plan = with_scales(BASE, scales)
    uniform = experts if kind == "bf16" else quantized(experts, scales)
    bank = ExpertBank.from_experts(plan.with_bf16() if kind == "bf16" else plan, bf16=experts)
    name = f"w13_{kind}"
    assert_same_bits(getattr(bank, name), uniform.w13)
    addend = torch.randn(21, 192)
    expected = uniform(*inputs, addend=addend)
    assert_same_bits(bank(*inputs, addend=addend), expected)
    direct = fused_moe_mixed_reference(inputs[0], bank, *inputs[1:], addend=addend)
    assert_same_bits(direct, expected)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("form", FORMS)
def test_a_mixture_is_every_expert_and_stage_in_its_precision(form, name):
    experts, inputs, scales = layer_of(form)
    plan = with_scales(PLANS[name], scales)
    bank = ExpertBank.from_experts(plan, bf16=experts)
    addend = torch.randn(21, 192)
    out = fused_moe_mixed_reference(
        inputs[0], bank, *inputs[1:], addend=addend, out_dtype=torch.float32
    )
    plain = row_by_row(plan, experts, quantized(experts, scales), inputs, addend)
    # Rows of one token and of many are summed in other orders, which tips ties of FP8.
    assert dissimilarity(out, plain) < 1e-5
    assert_same_bits(bank(*inputs, addend=addend), out.bfloat16())


def test_a_mixture_is_neither_of_the_two():
    experts, inputs, _ = layer_of()
    mixed = ExpertBank.from_experts(PLANS["all four"], bf16=experts)(*inputs)
    for plan in (BASE, BASE.with_bf16()):
        assert not torch.equal(mixed, ExpertBank.from_experts(plan, bf16=experts)(*inputs))


def test_an_fp8_checkpoint_is_taken_as_it_is():
    experts, inputs, _ = layer_of()
    fp8 = quantized(experts, "block")
    fp8.w13_scale *= 1.5  # no longer what quantising would give
    plan = PLANS["all four"]
    chosen = sorted({e for stage in STAGES for e in plan.stage(stage).bf16})
    some = Experts.from_state_dict(
        {"gate_up_proj": experts.w13[chosen], "down_proj": experts.w2[chosen]}
    )
    bank = ExpertBank.from_experts(plan, fp8=fp8, bf16=some)
    other = ExpertBank.from_experts(plan, fp8=fp8, bf16=experts)
    assert_same_bits(bank(*inputs), other(*inputs))
    assert dissimilarity(bank(*inputs), row_by_row(plan, experts, fp8, inputs)) < 1e-5
    alone = ExpertBank.from_experts(BASE, fp8=fp8)
    assert_same_bits(alone(*inputs), fp8(*inputs))


def test_static_scales_of_a_checkpoint():
    experts, inputs, _ = layer_of()
    fp8 = quantized(experts, "tensor")
    static = Experts(6, 192, 96, dtype=torch.float8_e4m3fn, scales="tensor", static_scales=True)
    scales = {"a1_scale": torch.tensor(0.02), "a2_scale": torch.tensor(0.01)}
    static.load_state_dict(fp8.state_dict() | scales)
    plan = with_scales(PLANS["all four"], "tensor")
    bank = ExpertBank.from_experts(plan, fp8=static, bf16=experts)
    expected = fused_moe_mixed_reference(inputs[0], bank, *inputs[1:])
    assert_same_bits(bank(*inputs), expected)
    without = ExpertBank.from_experts(plan, fp8=fp8, bf16=experts)(*inputs)
    assert not torch.equal(expected, without)
    uniform = ExpertBank.from_experts(with_scales(BASE, "tensor"), fp8=static)
    assert_same_bits(uniform(*inputs), static(*inputs))


def test_stages_may_have_scales_of_their_own():
    experts, inputs, _ = layer_of()
    plan = PLANS["by expert"].with_fp8(experts=(), stages="down", scales="channel")
    bank = ExpertBank.from_experts(plan, bf16=experts)
    assert bank.w13_fp8_scale.shape == (4, 2, 1, 2)
    assert bank.w2_fp8_scale.shape == (4, 192)
    assert_same_bits(bank(*inputs), fused_moe_mixed_reference(inputs[0], bank, *inputs[1:]))


# routing


@pytest.mark.parametrize("name", ["by expert", "all four"])
def test_ids_of_experts_elsewhere_contribute_nothing(name):
    experts, (hidden, weights, ids), _ = layer_of()
    ids = ids.clone()
    ids[::3, 1], ids[1::3, 0], ids[2::3, 2], ids[0] = -1, 6, 2**40, -7
    bank = ExpertBank.from_experts(PLANS[name], bf16=experts)
    inputs = (hidden, weights, ids)
    plain = row_by_row(PLANS[name], experts, quantized(experts, "block"), inputs)
    assert dissimilarity(bank(*inputs), plain) < 1e-5
    assert not bank(*inputs)[0].any()


@pytest.mark.parametrize("name", ["by expert", "all four"])
def test_the_same_id_twice_counts_twice(name):
    experts, (hidden, weights, ids), _ = layer_of()
    bank = ExpertBank.from_experts(PLANS[name], bf16=experts)
    twice = ids[:, :1].expand(-1, 3).contiguous()
    once = bank(hidden, weights.sum(1, keepdim=True), ids[:, :1].contiguous())
    assert dissimilarity(bank(hidden, weights, twice), once) < 1e-5


@pytest.mark.parametrize("name", PLANS)
def test_no_tokens(name):
    experts, inputs, _ = layer_of()
    bank = ExpertBank.from_experts(PLANS[name], bf16=experts)
    assert bank(*(tensor[:0] for tensor in inputs)).shape == (0, 192)


@pytest.mark.parametrize("name", ["by expert", "all four"])
def test_an_expert_map_names_experts_of_the_bank(name):
    experts, (hidden, weights, ids), _ = layer_of()
    bank = ExpertBank.from_experts(PLANS[name], bf16=experts)
    table = torch.tensor([2, -1, 5, 0, 9, 4, 1, 3], dtype=torch.int32)
    expected = bank(hidden, weights, table.long()[ids])
    assert_same_bits(bank(hidden, weights, ids, expert_map=table), expected)


# memory, modules


@pytest.mark.parametrize("name", ["by expert", "all four"])
def test_leading_dimensions_and_memory_of_the_caller(name):
    experts, inputs, _ = layer_of()
    bank = ExpertBank.from_experts(PLANS[name], bf16=experts)
    addend = torch.randn(21, 192)
    expected = bank(*inputs, addend=addend)
    shaped = [tensor.reshape(3, 7, -1) for tensor in (*inputs, addend)]
    out = torch.full((3, 7, 192), float("nan")).bfloat16()
    workspace = torch.empty(bank.workspace_size(21, 3), dtype=torch.uint8)
    result = bank(*shaped[:3], addend=shaped[3], out=out, workspace=workspace)
    assert result is out
    assert_same_bits(out.reshape(21, 192), expected)


def test_a_layer_takes_a_bank_in_place_of_experts():
    experts, (hidden, _, _), _ = layer_of()
    bank = ExpertBank.from_experts(PLANS["all four"], bf16=experts)
    layer = MoELayer(torch.nn.Linear(192, 6, bias=False), bank, top_k=2)
    weights, ids = layer.route(hidden)
    assert_same_bits(layer(hidden), bank(hidden, weights, ids))


MOVES = {
    "half": lambda bank: bank.half(),
    "deepcopy": copy.deepcopy,
    "meta and back": lambda bank: filled(
        copy.deepcopy(bank).to("meta").to_empty(device="cpu"), bank
    ),
    "state dict": lambda bank: filled(ExpertBank(bank.plan, 192, 232), bank),
}


def filled(empty, bank):
    empty.load_state_dict({name: t.contiguous() for name, t in bank.state_dict().items()})
    return empty


@pytest.mark.parametrize("move", MOVES)
def test_moves_keep_values_dtypes_and_aligned_rows(move):
    sizes = Sizes(num_tokens=9, num_experts=6, top_k=3, hidden=192, intermediate=232)
    experts, inputs, _ = layer_of(sizes=sizes)
    bank = ExpertBank.from_experts(PLANS["all four"], bf16=experts)
    expected = bank(*inputs)
    moved = MOVES[move](bank)
    assert moved.w2_fp8.dtype is torch.float8_e4m3fn
    assert moved.w2_fp8.stride()[1] == 240
    assert moved.w2_bf16.dtype is torch.bfloat16
    assert moved.w13_slots.tolist() == bank.w13_slots.tolist()
    assert_same_bits(moved(*inputs), expected)


def test_slots():
    bank = ExpertBank(PLANS["all four"], 64, 32)
    # Both FP8: 1, 2, 4; both BF16: 3; gate_up FP8 and down BF16: 0; the other way: 5.
    assert bank.w13_slots.tolist() == [3, 0, 1, -1, 2, -2]
    assert bank.w2_slots.tolist() == [-1, 0, 1, -2, 2, 3]
    assert bank.w13_slots.dtype is torch.int32
    assert bank.places.tolist() == [3, 0, 1, 4, 2, 5]
    assert set(bank.state_dict()) == {
        "w13_fp8", "w13_bf16", "w2_fp8", "w2_bf16", "w13_fp8_scale", "w2_fp8_scale",
    }  # fmt: skip
    uniform = ExpertBank(BASE, 64, 32)
    assert uniform.w13_bf16 is uniform.w2_bf16 is None
    assert uniform.w2_slots.tolist() == list(range(6))


def test_repr():
    assert repr(ExpertBank(PLANS["all four"], 64, 32)) == (
        "ExpertBank(num_experts=6, hidden_size=64, intermediate_size=32, activation='swiglu', "
        "bf16 gate_up=2, bf16 down=2)"
    )


def test_backward_raises():
    experts, (hidden, weights, ids), _ = layer_of()
    bank = ExpertBank.from_experts(PLANS["all four"], bf16=experts)
    assert not any(p.requires_grad for p in bank.parameters())
    with pytest.raises(RuntimeError, match="inference only"):
        bank(hidden.requires_grad_(), weights, ids).sum().backward()


@pytest.mark.parametrize("name", ["by expert", "down of all", "all four"])
def test_compile_gives_one_graph(name):
    torch._dynamo.reset()
    experts, inputs, _ = layer_of()
    bank = ExpertBank.from_experts(PLANS[name], bf16=experts)
    compiled = torch.compile(bank, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(*inputs), bank(*inputs))


def test_the_function_takes_rows():
    experts, inputs, _ = layer_of()
    bank = ExpertBank.from_experts(PLANS["all four"], bf16=experts)
    assert_same_bits(fused_moe_mixed(inputs[0], bank, *inputs[1:]), bank(*inputs))
    assert moe_ext.ExpertBank is ExpertBank
