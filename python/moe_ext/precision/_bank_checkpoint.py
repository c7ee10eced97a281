"""A bank of a layer of a converted checkpoint: what the plan says is what must be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_ext._activations import ACTIVATIONS, CONCATENATED, INTERLEAVED
from moe_ext.nn._per_expert import PerExpertReader
from moe_ext.nn._pieces import FP8 as FP8_DTYPE
from moe_ext.nn._pieces import Piece, quoted
from moe_ext.nn._store import join_scales
from moe_ext.precision._checkpoint import Checkpoint, CheckpointSource
from moe_ext.precision._plan_json import check_version
from moe_ext.precision._slots import WEIGHT, slots_of
from moe_ext.precision.bank import ExpertBank
from moe_ext.precision.convert import METHOD, PLAN_FILE, VERSION
from moe_ext.precision.layer_plan import FP8
from moe_ext.precision.plan import PrecisionPlan

_OP = "ExpertBank.from_checkpoint"
_Bank = TypeVar("_Bank", bound=ExpertBank)


def bank_of_checkpoint(
    cls: type[_Bank],
    directory: str | Path,
    layer: str,
    device: torch.device | str | None,
    options: dict[str, Any],
) -> _Bank:
    """Return the bank; arguments as in `ExpertBank.from_checkpoint`."""
    checkpoint = Checkpoint(_OP, directory)
    path = checkpoint.directory / PLAN_FILE
    if not path.is_file():
        raise ValueError(
            f"{_OP}: {checkpoint.directory} must hold {PLAN_FILE}, as `convert_checkpoint` writes "
            "it, got none"
        )
    method = checkpoint.config(_OP).get("quantization_config")
    if isinstance(method, dict) and method.get("quant_method") == METHOD:
        check_version(_OP, "quantization_config.version", method.get("version", 1), VERSION)
    plan = PrecisionPlan.load(path).layer(layer)
    found = checkpoint.layer(_OP, layer)
    # Raises for bad options before anything is read.
    example = cls(plan, 8, 8, device="meta", **options)
    if example.gate_up_layout == INTERLEAVED:
        raise ValueError(
            f'{_OP}: `gate_up_layout` must be "{CONCATENATED}", as `convert_checkpoint` writes '
            f'gate and up, got "{INTERLEAVED}"'
        )
    gated = ACTIVATIONS[example.activation].gated
    source = CheckpointSource(_OP, found.tensors(), consume=False)
    names = CheckpointSource(_OP, found.tensors(meta=True), consume=False)
    prefix = f"{layer}."
    shapes = PerExpertReader(names, prefix, gated)
    reader = PerExpertReader(source, prefix, gated)
    if reader.num_experts != plan.num_experts:
        raise ValueError(
            f"{_OP}: {quoted(layer)} must have {plan.num_experts} experts, as {PLAN_FILE} says, "
            f"got {reader.num_experts}"
        )
    down = shapes.matrices(WEIGHT["down"], 0)[0]
    place, bias = "cpu" if device is None else device, down.bias is not None
    bank = cls(plan, *down.weight.shape, device=place, bias=bias, **options)
    for (stage, kind), experts in slots_of(plan).items():
        if not experts:
            continue
        scales: list[tuple[Tensor, ...]] = []
        biases: list[Tensor] = []
        name = f"{WEIGHT[stage]}_{kind}"
        for own, expert in zip(getattr(bank, name), experts, strict=True):
            pieces = reader.matrices(WEIGHT[stage], expert)
            _check(bank, stage, kind, pieces, bias)
            for part, piece in zip(own.chunk(len(pieces)), pieces, strict=True):
                part.copy_(piece.weight)
            scales.append(tuple(piece.scale for piece in pieces if piece.scale is not None))
            biases += [torch.cat([p.bias for p in pieces if p.bias is not None])] if bias else []
        if biases:  # in their own dtype
            getattr(bank, f"{name}_bias").data = torch.stack(biases).to(place)
        if kind == FP8:
            joined = join_scales(scales, plan.stage(stage).scales, getattr(bank, name).shape[1])
            getattr(bank, f"{name}_scale").copy_(joined)
    return bank


def _check(
    bank: ExpertBank, stage: str, kind: str, pieces: tuple[Piece, ...], has_bias: bool
) -> None:
    """Raise a ValueError unless an expert's matrices are as plan and sizes have them."""
    n, k = bank.matrix_shape(stage)
    shape = (n // len(pieces), k)
    layout = bank.plan.stage(stage).scales if kind == FP8 else None
    dtype = FP8_DTYPE if kind == FP8 else torch.bfloat16
    for piece in pieces:
        weight = piece.weight
        own = (weight.dtype, tuple(weight.shape), piece.layout, piece.bias is not None)
        if own != (dtype, shape, layout, has_bias):
            raise ValueError(
                f"{_OP}: `{piece.name}` must be {_said(dtype, shape, layout, has_bias)}, as "
                f"{PLAN_FILE} and the other experts say, got {_said(*own)}"
            )


def _said(dtype: torch.dtype, shape: tuple[int, ...], layout: str | None, has_bias: bool) -> str:
    name = str(dtype).removeprefix("torch.")
    scales = "" if layout is None else f" with scales per {layout}"
    return f"{name} {shape}{scales}{', with a bias' if has_bias else ''}"
