"""`convert_checkpoint`: experts as the plan says, everything else byte for byte, and back again."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from moe_ext.nn import Experts
from moe_ext.precision import ExpertBank, PrecisionPlan, convert_checkpoint
from moe_ext.precision._tensor_files import read_header

pytest.importorskip("safetensors")
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.checkpoints import FORMS, SIZES, plan_of, write_checkpoint
from support.tolerance import assert_same_bits

INDEX = "model.safetensors.index.json"


def all_tensors(directory):
    """Every tensor of a checkpoint, by the index where there is one."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    if (directory / INDEX).is_file():
        weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
        assert set(weight_map) == set(tensors)
        for name, file in weight_map.items():
            with safe_open(directory / file, framework="pt") as opened:
                assert name in opened.keys()  # noqa: SIM118
    return tensors


def as_bytes(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_bank_is(bank, wanted):
    assert bank.state_dict().keys() == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        own = getattr(bank, name)
        assert own.shape == tensor.shape, name
        assert torch.equal(as_bytes(own), as_bytes(tensor)), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scales", ["block", "channel", "tensor"])
def test_experts_are_those_of_a_bank_of_the_originals(tmp_path, form, scales):
    layers = write_checkpoint(tmp_path / "in", form)
    plan = plan_of(layers, scales)
    convert_checkpoint(tmp_path / "in", plan, tmp_path / "out")
    for name, experts in layers.items():
        bank = ExpertBank.from_checkpoint(tmp_path / "out", name)
        assert bank.plan == plan.layer(name)
        assert_bank_is(bank, ExpertBank.from_experts(plan.layer(name), bf16=experts))


@pytest.mark.parametrize("files", [1, 3])
def test_all_other_tensors_are_the_same_bytes(tmp_path, files):
    layers = write_checkpoint(tmp_path / "in", files=files)
    converted = convert_checkpoint(tmp_path / "in", plan_of(layers), tmp_path / "out")
    before, after = all_tensors(tmp_path / "in"), all_tensors(tmp_path / "out")
    rest = [name for name in before if ".experts." not in name]
    assert len(rest) == 1 + 6 * len(layers)
    for name in rest:
        assert before[name].dtype is after[name].dtype
        assert before[name].shape == after[name].shape
        assert torch.equal(as_bytes(before[name]), as_bytes(after[name])), name
    own = {name for name in after if ".experts." in name}
    assert own - set(before) == {name for name in own if name.endswith("weight_scale_inv")}
    assert converted.num_files == files
    assert converted.num_fp8 == 3 * 2 * 6 - 3 * (2 + 2 + 1)
    assert converted.num_bytes == sum(
        path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")
    )


def test_bf16_experts_are_the_same_bytes(tmp_path):
    layers = write_checkpoint(tmp_path / "in")
    convert_checkpoint(tmp_path / "in", plan_of(layers), tmp_path / "out")
    before, after = all_tensors(tmp_path / "in"), all_tensors(tmp_path / "out")
    for layer in layers:
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = f"{layer}.3.{part}.weight"
            assert torch.equal(as_bytes(before[name]), as_bytes(after[name]))
            assert f"{layer}.3.{part}.weight_scale_inv" not in after
            assert after[f"{layer}.1.{part}.weight"].dtype is torch.float8_e4m3fn


def test_a_second_run_writes_the_same_files(tmp_path):
    layers = write_checkpoint(tmp_path / "in")
    for out, workers in (("one", 1), ("two", 3)):
        convert_checkpoint(tmp_path / "in", plan_of(layers), tmp_path / out, workers=workers)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize("said_by", ["argument", "config"])
def test_interleaved_gate_and_up_with_biases_are_taken_apart(tmp_path, said_by):
    layers = write_checkpoint(tmp_path / "in", "packed", "interleaved with biases")
    plan = plan_of(layers)
    said = {"gate_up_layout": "interleaved"} if said_by == "argument" else {}
    if said_by == "config":
        (tmp_path / "in/config.json").write_text('{"model_type": "gpt_oss"}')
    convert_checkpoint(tmp_path / "in", plan, tmp_path / "out", **said)
    for name, experts in layers.items():
        apart = {
            "gate_up_proj": torch.cat([experts.w13[:, 0::2], experts.w13[:, 1::2]], 1),
            "gate_up_proj_bias": torch.cat(
                [experts.w13_bias[:, 0::2], experts.w13_bias[:, 1::2]], 1
            ),
            "down_proj": experts.w2,
            "down_proj_bias": experts.w2_bias,
        }
        wanted = Experts.from_state_dict(apart, activation="swiglu_oai")
        bank = ExpertBank.from_checkpoint(tmp_path / "out", name, activation="swiglu_oai")
        assert_bank_is(bank, ExpertBank.from_experts(plan.layer(name), bf16=wanted))


@pytest.mark.parametrize("form", ["qwen3", "packed"])
def test_ungated_experts(tmp_path, form):
    layers = write_checkpoint(tmp_path / "gated")
    experts = next(iter(layers.values()))
    w13 = experts.w13[:, : SIZES.intermediate]
    tensors = {"x.experts.up_proj": w13, "x.experts.down_proj": experts.w2}
    if form == "qwen3":
        tensors = {
            f"x.experts.{e}.{name.split('.')[2]}.weight": tensor[e].contiguous()
            for name, tensor in tensors.items()
            for e in range(SIZES.num_experts)
        }
    (tmp_path / "in").mkdir()
    (tmp_path / "in/config.json").write_text("{}")
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "in/model.safetensors")
    plan = plan_of({"x.experts": experts})
    convert_checkpoint(tmp_path / "in", plan, tmp_path / "out")
    wanted = Experts.from_state_dict(
        {"up_proj": w13, "down_proj": experts.w2}, activation="relu2", transposed=False
    )
    bank = ExpertBank.from_checkpoint(tmp_path / "out", "x.experts", activation="relu2")
    assert_bank_is(bank, ExpertBank.from_experts(plan.layer(0), bf16=wanted))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_wider_weights_become_bf16_or_fp8(tmp_path, dtype):
    layers = write_checkpoint(tmp_path / "in", files=1)
    path = tmp_path / "in/model.safetensors"
    tensors = {
        name: (tensor.to(dtype) * 1.001 if ".experts." in name else tensor)
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)
    plan = plan_of(layers)
    convert_checkpoint(tmp_path / "in", plan, tmp_path / "out")
    after = all_tensors(tmp_path / "out")
    for name in layers:
        bank = ExpertBank.from_checkpoint(tmp_path / "out", name)
        fp8 = Experts.from_state_dict(tensors, prefix=name, quantize="block")
        slot = int(bank.w13_slots[1])
        assert_same_bits(bank.w13_fp8[slot], fp8.w13[1])
        own = after[f"{name}.3.up_proj.weight"]
        assert_same_bits(own, tensors[f"{name}.3.up_proj.weight"].bfloat16())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e-40])
def test_values_that_are_not_finite_or_tiny_are_quantised_as_by_the_op(tmp_path, value):
    layers = write_checkpoint(tmp_path / "in", files=1)
    path, tensors = tmp_path / "in/model.safetensors", load_file(tmp_path / "in/model.safetensors")
    layer = next(iter(layers))
    tensors[f"{layer}.1.up_proj.weight"][5, 7] = value
    tensors[f"{layer}.1.down_proj.weight"][:] = value
    save_file(tensors, path)
    convert_checkpoint(tmp_path / "in", plan_of(layers), tmp_path / "out")
    bank = ExpertBank.from_checkpoint(tmp_path / "out", layer)
    fp8 = Experts.from_state_dict(tensors, prefix=layer, quantize="block")
    for weight in ("w13", "w2"):
        slot = int(getattr(bank, f"{weight}_slots")[1])
        for end in ("", "_scale"):
            own, wanted = getattr(bank, f"{weight}_fp8{end}")[slot], getattr(fp8, weight + end)[1]
            assert torch.equal(as_bytes(own), as_bytes(wanted))


def test_layers_that_the_plan_does_not_name_are_copied(tmp_path):
    layers = write_checkpoint(tmp_path / "in", "packed")
    name = list(layers)[1]
    plan = PrecisionPlan.uniform({name: SIZES.num_experts})
    converted = convert_checkpoint(tmp_path / "in", plan, tmp_path / "out")
    assert converted.unplanned == ("model.layers.1.mlp.experts", "model.layers.2.mlp.experts")
    before, after = all_tensors(tmp_path / "in"), all_tensors(tmp_path / "out")
    for other in converted.unplanned:
        for part in ("gate_up_proj", "down_proj"):
            assert_same_bits(after[f"{other}.{part}"], before[f"{other}.{part}"])


def test_other_files_and_the_plan_are_beside_it(tmp_path):
    layers = write_checkpoint(tmp_path / "in")
    plan = plan_of(layers)
    convert_checkpoint(tmp_path / "in", plan, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        *(f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)),
        *(INDEX, "config.json", "tokenizer.json", "precision_plan.json"),
    }
    assert PrecisionPlan.load(tmp_path / "out/precision_plan.json") == plan
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "moe_ext",
        "version": 1,
        "plan": "precision_plan.json",
    }
    assert config == json.loads((tmp_path / "in/config.json").read_text())
    total = json.loads((tmp_path / "out" / INDEX).read_text())["metadata"]["total_size"]
    assert total == sum(t.nbytes for t in all_tensors(tmp_path / "out").values())


def test_a_second_copy_of_the_weights_is_not_looked_at(tmp_path):
    layers = write_checkpoint(tmp_path / "in", files=1)
    (tmp_path / "in/consolidated.safetensors").write_bytes(b"other")
    convert_checkpoint(tmp_path / "in", plan_of(layers), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1


def test_progress_ends_at_the_total(tmp_path):
    layers = write_checkpoint(tmp_path / "in")
    lock, done = threading.Lock(), []

    def note(count, total):
        with lock:
            done.append((count, total))

    converted = convert_checkpoint(
        tmp_path / "in", plan_of(layers), tmp_path / "out", progress=note
    )
    assert {total for _, total in done} == {converted.input_bytes}
    assert sum(count for count, _ in done) == converted.input_bytes


def test_tensors_are_aligned_to_their_elements(tmp_path):
    layers = write_checkpoint(tmp_path / "in")
    convert_checkpoint(tmp_path / "in", plan_of(layers), tmp_path / "out")
    for path in (tmp_path / "out").glob("*.safetensors"):
        for name, entry in read_header("x", path).entries.items():
            item = {"F32": 4, "I64": 8, "BF16": 2, "F16": 2}.get(entry.dtype, 1)
            assert entry.begin % item == 0, name


def test_an_empty_folder_may_be_there(tmp_path):
    layers = write_checkpoint(tmp_path / "in")
    (tmp_path / "out").mkdir()
    convert_checkpoint(tmp_path / "in", plan_of(layers), tmp_path / "out")
    assert (tmp_path / "out" / INDEX).is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
