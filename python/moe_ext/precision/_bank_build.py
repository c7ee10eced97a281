"""A bank made of experts: BF16 weights are copied or quantised, FP8 ones copied, one at a time."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_ext.nn._arguments import shown
from moe_ext.nn._pieces import Piece
from moe_ext.nn._store import join_scales, quantize_pieces
from moe_ext.nn.experts import Experts
from moe_ext.precision._slots import WEIGHT, slots_of
from moe_ext.precision.bank import ExpertBank
from moe_ext.precision.layer_plan import BF16, FP8, STAGES, LayerPlan

_OP = "ExpertBank.from_experts"
_Bank = TypeVar("_Bank", bound=ExpertBank)


def bank_of_experts(
    cls: type[_Bank],
    plan: LayerPlan,
    bf16: Experts | None,
    fp8: Experts | None,
    device: torch.device | str | None,
) -> _Bank:
    """Return the bank; arguments as in `ExpertBank.from_experts`."""
    if not isinstance(plan, LayerPlan):
        raise ValueError(f"{_OP}: `plan` must be a LayerPlan, got {shown(plan)}")
    _check_kind("bf16", bf16, torch.bfloat16)
    _check_kind("fp8", fp8, torch.float8_e4m3fn)
    place_of = _places(plan, bf16, fp8)
    first = bf16 if fp8 is None else fp8
    assert first is not None
    bank = cls(
        plan,
        first.hidden_size,
        first.intermediate_size,
        device=first.w2.device if device is None else device,
        static_scales=first.a1_scale is not None,
        bias=first.w2_bias is not None,
        **_options(bf16, fp8),
    )
    for (stage, kind), experts in slots_of(plan).items():
        if not experts:
            continue
        source = fp8 if kind == FP8 and fp8 is not None else bf16
        assert source is not None
        places = experts if source is fp8 else tuple(place_of[expert] for expert in experts)
        if kind == BF16 or source is fp8:
            _copy(bank, source, stage, kind, places)
        else:
            _quantize(bank, source, stage, places)
        _copy_bias(bank, source, stage, kind, places)
    if first.a1_scale is not None:
        for name in ("a1_scale", "a2_scale"):
            getattr(bank, name).copy_(getattr(first, name))
    return bank


def _check_kind(name: str, experts: Any, dtype: torch.dtype) -> None:
    if experts is None:
        return
    if not isinstance(experts, Experts):
        raise ValueError(f"{_OP}: `{name}` must be None or Experts, got {shown(experts)}")
    if experts.w2.dtype is not dtype:
        got = str(experts.w2.dtype).removeprefix("torch.")
        raise ValueError(
            f"{_OP}: `{name}` must have weights in {str(dtype).removeprefix('torch.')}, got {got}"
        )


def _places(plan: LayerPlan, bf16: Experts | None, fp8: Experts | None) -> dict[int, int]:
    """Return where `bf16` has each expert, after checking that all that is needed is there."""
    count = plan.num_experts
    chosen = sorted({expert for stage in STAGES for expert in plan.stage(stage).bf16})
    if bf16 is None and (fp8 is None or chosen):
        need = "Experts where there is no `fp8`"
        if fp8 is not None:
            need = f"Experts for a plan with {len(chosen)} experts in BF16"
        raise ValueError(f"{_OP}: `bf16` must be {need}, got None")
    if fp8 is not None:
        _check_fp8(plan, fp8)
    if bf16 is None:
        return {}
    if bf16.num_experts == count:
        return {expert: expert for expert in range(count)}
    if fp8 is None or bf16.num_experts != len(chosen):
        need = f"{count} experts"
        if fp8 is not None:
            need += f", or the {len(chosen)} that have a stage in BF16"
        raise ValueError(f"{_OP}: `bf16` must have {need}, got {bf16.num_experts}")
    return {expert: place for place, expert in enumerate(chosen)}


def _check_fp8(plan: LayerPlan, fp8: Experts) -> None:
    if fp8.num_experts != plan.num_experts:
        raise ValueError(
            f"{_OP}: `fp8` must have {plan.num_experts} experts, as the plan, got {fp8.num_experts}"
        )
    for stage in STAGES:
        scale = getattr(fp8, f"{WEIGHT[stage]}_scale")
        layout = {1: "tensor", 2: "channel"}.get(scale.dim(), "block")
        wanted = plan.stage(stage).scales
        if layout != wanted and plan.num_experts != len(plan.stage(stage).bf16):
            raise ValueError(
                f"{_OP}: `fp8` must have scales per {wanted} in {stage}, as the plan, got scales "
                f"per {layout}"
            )


def _options(bf16: Experts | None, fp8: Experts | None) -> dict[str, Any]:
    """Return the options of the bank, which both kinds of experts must share."""
    own, other = (bf16, None) if fp8 is None else (fp8, bf16)
    assert own is not None
    options = own._choices()
    if other is None:
        return options
    sizes = [(e.hidden_size, e.intermediate_size) for e in (own, other)]
    has_bias = [e.w2_bias is not None for e in (own, other)]
    pairs: list[tuple[str, Any, Any]] = [
        ("sizes", sizes[0], sizes[1]),
        ("biases", has_bias[0], has_bias[1]),
    ]
    # Only some experts may be here in BF16, and the accumulation is that of FP8.
    pairs += [
        (f"`{name}`", value, other._choices()[name])
        for name, value in options.items()
        if name not in ("first_expert", "accumulate")
    ]
    for name, of_fp8, of_bf16 in pairs:
        if of_fp8 != of_bf16:
            raise ValueError(
                f"{_OP}: `bf16` must have the {name} of `fp8`, {of_fp8!r}, got {of_bf16!r}"
            )
    return options


def _copy(
    bank: ExpertBank, source: Experts, stage: str, kind: str, places: tuple[int, ...]
) -> None:
    name = f"{WEIGHT[stage]}_{kind}"
    weight, scale = getattr(source, WEIGHT[stage]), getattr(source, f"{WEIGHT[stage]}_scale")
    for own, place in zip(getattr(bank, name), places, strict=True):
        own.copy_(weight[place])
    if kind == FP8:
        index = torch.tensor(places, device=scale.device)
        _take(bank, f"{name}_scale", scale[index])


def _take(bank: ExpertBank, name: str, scale: Tensor) -> None:
    """Put scales in their place; gate and up of a checkpoint may share a grid of blocks."""
    setattr(bank, name, scale.to(getattr(bank, name).device))


def _quantize(bank: ExpertBank, source: Experts, stage: str, places: tuple[int, ...]) -> None:
    name, layout = f"{WEIGHT[stage]}_{FP8}", bank.plan.stage(stage).scales
    weight, packed = getattr(source, WEIGHT[stage]), getattr(bank, name)
    scales: list[tuple[Tensor, ...]] = []
    for own, place in zip(packed, places, strict=True):
        parts = weight[place].chunk(2) if bank.has_halves(stage) else (weight[place],)
        pieces = quantize_pieces(tuple(Piece(name, part) for part in parts), layout, packed.device)
        own.copy_(torch.cat([piece.weight for piece in pieces]))
        scales.append(tuple(piece.scale for piece in pieces if piece.scale is not None))
    _take(bank, f"{name}_scale", join_scales(scales, layout, packed.shape[1]))


def _copy_bias(
    bank: ExpertBank, source: Experts, stage: str, kind: str, places: tuple[int, ...]
) -> None:
    bias = getattr(source, f"{WEIGHT[stage]}_bias")
    if bias is not None:
        index = torch.tensor(places, device=bias.device)
        name = f"{WEIGHT[stage]}_{kind}_bias"
        own = getattr(bank, name)
        own.data = bias.data[index].to(own.device)  # in its own dtype


__all__ = ["bank_of_experts"]
