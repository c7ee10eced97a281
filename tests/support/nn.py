"""Checkpoints in the forms that `moe_ext.nn.Experts` reads, made of layers of `fused_moe`."""

from __future__ import annotations

import torch
from moe_ext.nn import Experts
from torch import Tensor

NAMES = ("gate_proj", "up_proj", "down_proj")
OPTIONS = ("activation", "alpha", "limit", "gate_up_layout", "apply_router_weight_on_input")


def options_of(layer: dict[str, object]) -> dict[str, object]:
    """Those arguments of `fused_moe` that `Experts` keeps."""
    return {name: layer[name] for name in OPTIONS if name in layer}


def inputs_of(layer: dict[str, object]) -> tuple[Tensor, Tensor, Tensor]:
    """Those arguments of `fused_moe` that `Experts.forward` takes."""
    return layer["hidden_states"], layer["topk_weights"], layer["topk_ids"]


def per_expert(
    layer: dict[str, object],
    prefix: str = "",
    names: tuple[str, ...] = NAMES,
    scale: str = "weight_scale",
) -> dict[str, Tensor]:
    """Each expert's matrices under their own names, gate and up apart where there are three."""
    tensors: dict[str, Tensor] = {}
    experts, halves = layer["w13"].shape[0], len(names) - 1
    for stage, own in (("w13", names[:-1]), ("w2", names[-1:])):
        count = halves if stage == "w13" else 1
        for e in range(experts):
            for i, name in enumerate(own):
                base = f"{prefix}{e}.{name}"
                tensors[f"{base}.weight"] = layer[stage][e].chunk(count)[i].clone()
                if f"{stage}_bias" in layer:
                    tensors[f"{base}.bias"] = layer[f"{stage}_bias"][e].chunk(count)[i].clone()
                if f"a{stage[1]}_scale" in layer:
                    tensors[f"{base}.input_scale"] = layer[f"a{stage[1]}_scale"].reshape(1)
                scales = layer.get(f"{stage}_scale")
                if scales is None:
                    continue
                of_expert = scales if scales.dim() == 0 else scales[e]
                if scales.dim() == 4:
                    of_expert = of_expert[i]
                elif scales.dim() > 1:
                    of_expert = of_expert.chunk(count)[i]
                if scales.dim() == 2:
                    of_expert = of_expert[:, None]
                tensors[f"{base}.{scale}"] = of_expert.clone()
    return tensors


def packed(
    layer: dict[str, object], prefix: str = "", transposed: bool = False
) -> dict[str, Tensor]:
    """The matrices of all experts in one tensor, as Transformers has them."""
    tensors: dict[str, Tensor] = {}
    for stage, name in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        weight = layer[stage]
        tensors[prefix + name] = (weight.mT if transposed else weight).clone(
            memory_format=torch.contiguous_format
        )
        if f"{stage}_bias" in layer:
            tensors[f"{prefix}{name}_bias"] = layer[f"{stage}_bias"]
        if f"{stage}_scale" in layer:
            tensors[f"{prefix}{name}_scale_inv"] = layer[f"{stage}_scale"]
    return tensors


def experts_of(layer: dict[str, object], device: str | None = None, **changes: object) -> Experts:
    """Experts with the tensors of a layer, by `load_state_dict` into empty ones."""
    experts, hidden, inner = layer["w2"].shape
    scales = layer.get("w13_scale")
    made = Experts(
        experts,
        hidden,
        inner,
        dtype=layer["w13"].dtype,
        device=device,
        scales=None if scales is None else {1: "tensor", 2: "channel"}.get(scales.dim(), "block"),
        bias="w13_bias" in layer,
        **(options_of(layer) | changes),
    )
    tensors = {name: layer[name] for name in made.state_dict()}
    made.load_state_dict(tensors)
    return made
