"""Small checkpoints on disk, in the forms that models are published in."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from moe_ext.nn import Experts
from moe_ext.precision import PrecisionPlan
from safetensors.torch import save_file
from torch import Tensor

from support.bank import layer_of
from support.fused_moe import Sizes
from support.nn import packed, per_expert

SIZES = Sizes(num_tokens=9, num_experts=6, top_k=3, hidden=192, intermediate=136)
LAYERS = (1, 10, 2)  # out of order, and not as strings are
# Of each form: prefix of a layer, names of an expert's matrices or None for packed ones.
FORMS = {
    "qwen3": ("model.layers.{}.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("model.layers.{}.block_sparse_moe.experts", ("w1", "w3", "w2")),
    "packed": ("model.layers.{}.mlp.experts", None),
    "transposed": ("model.layers.{}.mlp.experts", None),
}


def layer_dict(experts: Experts) -> dict[str, object]:
    """The tensors of experts as `support.nn` takes them."""
    layer: dict[str, object] = {"w13": experts.w13.data, "w2": experts.w2.data}
    if experts.w13_bias is not None:
        layer |= {"w13_bias": experts.w13_bias.data, "w2_bias": experts.w2_bias.data}
    return layer


def tensors_of(form: str, experts: Experts, number: int) -> dict[str, Tensor]:
    """One layer's experts under the names of a form."""
    prefix, names = FORMS[form]
    prefix = f"{prefix.format(number)}."
    layer = layer_dict(experts)
    if names is None:
        return packed(layer, prefix, transposed=form == "transposed")
    return per_expert(layer, prefix, names)


def others_of(number: int) -> dict[str, Tensor]:
    """What a layer has beside experts, in several dtypes."""
    name = f"model.layers.{number}"
    return {
        f"{name}.mlp.gate.weight": torch.randn(SIZES.num_experts, SIZES.hidden).bfloat16(),
        f"{name}.mlp.shared_expert.up_proj.weight": torch.randn(17, SIZES.hidden).half(),
        f"{name}.norm.weight": torch.randn(SIZES.hidden),
        f"{name}.steps": torch.tensor(number),
        f"{name}.mask": torch.tensor([True, False, True]),
        f"{name}.empty": torch.empty(0, 3),
    }


def write_checkpoint(
    directory: Path, form: str = "qwen3", bank_form: str = "plain", files: int = 3
) -> dict[str, Experts]:
    """Write a checkpoint of three layers with its config; return experts by the layer's name."""
    directory.mkdir()
    found, tensors = {}, {"model.embed_tokens.weight": torch.randn(11, SIZES.hidden).bfloat16()}
    for number in LAYERS:
        experts, _, _ = layer_of(bank_form, SIZES)
        found[FORMS[form][0].format(number)] = experts
        tensors |= tensors_of(form, experts, number) | others_of(number)
    # Dealt out like cards: matrices of one expert are in different files.
    names, index = list(tensors), {}
    for file in range(files):
        own = names[file::files]
        name = f"model-{file + 1}.safetensors" if files > 1 else "model.safetensors"
        save_file({key: tensors[key] for key in own}, directory / name, metadata={"format": "pt"})
        index |= dict.fromkeys(own, name)
    if files > 1:
        text = json.dumps({"metadata": {}, "weight_map": index})
        (directory / "model.safetensors.index.json").write_text(text)
    config = {"model_type": "test", "num_experts_per_tok": SIZES.top_k, "hidden_act": "silu"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "pytorch_model.bin").write_bytes(b"old")
    return found


def plan_of(layers: dict[str, Experts], scales: str = "block") -> PrecisionPlan:
    """All kinds of experts: FP8, BF16, and each of the two by stage."""
    plan = PrecisionPlan.uniform(dict.fromkeys(layers, SIZES.num_experts), scales=scales)
    return (
        plan.with_bf16(experts=3)
        .with_bf16(experts=(0, 4), stages="down")
        .with_bf16(experts=5, stages="gate_up")
    )
