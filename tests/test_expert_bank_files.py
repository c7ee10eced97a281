"""`ExpertBank.save` and `load`."""

from __future__ import annotations

import json

import pytest
import torch
from moe_ext.precision import ExpertBank, LayerPlan
from support.bank import FORMS, PLANS, layer_of, quantized, with_scales
from support.fused_moe import Sizes
from support.tolerance import assert_same_bits

pytest.importorskip("safetensors")
from safetensors import safe_open
from safetensors.torch import save_file

SIZES = Sizes(num_tokens=9, num_experts=6, top_k=3, hidden=192, intermediate=232)


def bank_of(form="plain", name="all four"):
    experts, inputs, scales = layer_of(form, SIZES)
    return ExpertBank.from_experts(with_scales(PLANS[name], scales), bf16=experts), inputs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["all four", "by expert"])
def test_a_bank_comes_back(tmp_path, form, name):
    bank, inputs = bank_of(form, name)
    bank.save(tmp_path / "bank.safetensors")
    again = ExpertBank.load(tmp_path / "bank.safetensors")
    assert again.plan == bank.plan
    assert again._choices() == bank._choices()
    assert again.w2_fp8.stride() == bank.w2_fp8.stride()  # rows are aligned
    for key, tensor in bank.state_dict().items():
        assert_same_bits(getattr(again, key), tensor)
    assert_same_bits(again(*inputs), bank(*inputs))
    assert not any(p.requires_grad for p in again.parameters())


def test_shards_and_checkpoints_come_back(tmp_path):
    bank, inputs = bank_of("interleaved with biases")
    part = bank.shard(first_expert=3, intermediate_range=(128, 232))
    part.save(tmp_path / "part")
    again = ExpertBank.load(tmp_path / "part")
    assert again.first_expert == 3
    assert again.w2_fp8_bias is None
    assert_same_bits(again(*inputs), part(*inputs))
    experts, inputs, _ = layer_of(sizes=SIZES)
    fp8 = quantized(experts, "block")
    fp8.w13_scale = torch.rand(6, 4, 2)  # gate and up share blocks
    whole = ExpertBank.from_experts(LayerPlan(6), fp8=fp8)
    whole.save(tmp_path / "whole")
    assert_same_bits(ExpertBank.load(tmp_path / "whole")(*inputs), fp8(*inputs))


def test_a_file_appears_when_it_is_complete(tmp_path, monkeypatch):
    bank, _ = bank_of()

    def fail(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("no space")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="no space"):
        bank.save(tmp_path / "bank")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [0, 4, 200, -9])
def test_a_truncated_file_is_named(tmp_path, length):
    bank, _ = bank_of()
    path = tmp_path / "bank"
    bank.save(path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"truncated, damaged or of another form$") as error:
        ExpertBank.load(path)
    said = f"ExpertBank.load: {path} must be a whole safetensors file, got "
    assert str(error.value).startswith(said)


def changed(path, header_changes, tensor_changes):
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["moe_ext"]) | header_changes
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors = {name: t for name, t in (tensors | tensor_changes).items() if t is not None}
    save_file(tensors, path, metadata={"moe_ext": json.dumps(header)})


WRONG = {
    "format": (
        {"format": "moe_ext.precision_stats"},
        {},
        '`format` must be "moe_ext.expert_bank", got "moe_ext.precision_stats"',
    ),
    "plan": ({"plan": 3}, {}, "PrecisionPlan: `plan` must be an object, got 3"),
    "missing": ({}, {"w2_bf16": None}, "`w2_bf16` must be bfloat16 (2, 192, 232), got none"),
    "shape": (
        {},
        {"w2_bf16": torch.zeros(3, 192, 232).bfloat16()},
        "`w2_bf16` must be bfloat16 (2, 192, 232), got bfloat16 (3, 192, 232)",
    ),
    "scale": (
        {},
        {"w13_fp8_scale": torch.zeros(4, 464)},
        "`w13_fp8_scale` must be float32 (4, 2, 2, 2), got float32 (4, 464)",
    ),
    "more": ({}, {"w3": torch.zeros(1)}, "the file must hold nothing else, got ['w3']"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_a_file(tmp_path, name):
    header, tensors, message = WRONG[name]
    bank, _ = bank_of()
    bank.save(tmp_path / "bank")
    changed(tmp_path / "bank", header, tensors)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        ExpertBank.load(tmp_path / "bank")
    assert str(error.value).removeprefix("ExpertBank.load: ") == message
