"""Part of a bank: some of its experts, and of these some of the intermediate features."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from moe_ext._activations import ACTIVATIONS
from moe_ext._math import ceil_div
from moe_ext._scales import SCALE_BLOCK
from moe_ext.nn._arguments import check_int, check_selection
from moe_ext.nn._options import MULTIPLE
from moe_ext.precision._slots import WEIGHT, slots_of
from moe_ext.precision.bank import ExpertBank
from moe_ext.precision.layer_plan import FP8, STAGES

_OP = "ExpertBank.shard"
_Bank = TypeVar("_Bank", bound=ExpertBank)


def shard_of_bank(
    bank: _Bank,
    first_expert: int | None,
    num_local: int | None,
    intermediate_range: tuple[int, int] | None,
) -> _Bank:
    """Return the shard; arguments as in `ExpertBank.shard`."""
    check_int(_OP, "first_expert", first_expert, optional=True)
    first = bank.first_expert if first_expert is None else first_expert
    check_selection(_OP, None, first, num_local, intermediate_range)
    begin = first - bank.first_expert
    end = bank.num_experts if num_local is None else begin + num_local
    if not 0 <= begin < end <= bank.num_experts:
        last = bank.first_expert + bank.num_experts - 1
        raise ValueError(
            f"{_OP}: `first_expert` and `num_local` must name experts among {bank.first_expert} to "
            f"{last}, at least one, got {first} and {num_local}"
        )
    features = _features(bank, intermediate_range)
    shard = type(bank)(
        bank.plan.of_experts(begin, end - begin),
        bank.hidden_size,
        features[1] - features[0],
        device=bank.places.device,
        static_scales=bank.a1_scale is not None,
        **(bank._choices() | {"first_expert": first}),
    )
    sources = slots_of(bank.plan)
    for (stage, kind), experts in slots_of(shard.plan).items():
        if experts:
            of_slot = {expert: slot for slot, expert in enumerate(sources[stage, kind])}
            slots = [of_slot[expert + begin] for expert in experts]
            _fill(shard, bank, stage, kind, slots, features)
    for name in ("a1_scale", "a2_scale"):
        scale = getattr(bank, name)
        if scale is not None:
            getattr(shard, name).copy_(scale)
    return shard


def _features(bank: ExpertBank, intermediate_range: tuple[int, int] | None) -> tuple[int, int]:
    """Return the range of features, after checking that it is exact."""
    size = bank.intermediate_size
    begin, end = intermediate_range or (0, size)
    if not 0 <= begin < end <= size or (end - begin) % MULTIPLE:
        raise ValueError(
            f"{_OP}: `intermediate_range` must be (begin, end) with 0 <= begin < end <= {size}, "
            f"the intermediate size, a multiple of {MULTIPLE} apart, got {(begin, end)}"
        )
    if (begin, end) == (0, size):
        return begin, end
    for stage in STAGES:
        if _scale_of(bank, stage) is None or bank.plan.stage(stage).scales != "block":
            continue
        interleaved = stage == "gate_up" and _rows_per_feature(bank) == 2
        grid = SCALE_BLOCK // (2 if interleaved and not bank.has_halves(stage) else 1)
        if begin % grid:
            raise ValueError(
                f"{_OP}: `intermediate_range` must begin at a multiple of {grid} where scales are "
                f"per block, got {(begin, end)}"
            )
        if _shares_blocks(bank, stage):
            raise ValueError(
                f"{_OP}: `intermediate_range` must be None where gate and up share blocks of "
                f"{SCALE_BLOCK} x {SCALE_BLOCK} (intermediate size {size}), got {(begin, end)}"
            )
    return begin, end


def _scale_of(bank: ExpertBank, stage: str) -> Tensor | None:
    scale: Tensor | None = getattr(bank, f"{WEIGHT[stage]}_{FP8}_scale")
    return scale


def _rows_per_feature(bank: ExpertBank) -> int:
    return 2 if ACTIVATIONS[bank.activation].gated else 1


def _shares_blocks(bank: ExpertBank, stage: str) -> bool:
    """Whether a block holds gate and up rows, which a grid for each would not have."""
    scale = _scale_of(bank, stage)
    halves = bank.has_halves(stage) and bank.intermediate_size % SCALE_BLOCK
    return bool(halves) and scale is not None and scale.dim() == 3


def _fill(
    shard: ExpertBank,
    bank: ExpertBank,
    stage: str,
    kind: str,
    slots: list[int],
    features: tuple[int, int],
) -> None:
    """Copy the slots of one stage in one precision."""
    name = f"{WEIGHT[stage]}_{kind}"
    weight = getattr(bank, name)
    for own, slot in zip(getattr(shard, name), slots, strict=True):
        if stage == "down":
            own.copy_(weight[slot][:, slice(*features)])
        else:
            own.copy_(_rows(bank, weight[slot], features))
    index = torch.tensor(slots, device=weight.device)
    if kind == FP8:
        scale = _scale_of(bank, stage)
        assert scale is not None
        setattr(shard, f"{name}_scale", _cut_scale(bank, stage, scale[index], features))
    bias = getattr(bank, f"{name}_bias")
    # Added once where the shards' results are summed.
    if bias is not None and (stage == "gate_up" or features[0] == 0):
        own = bias.data[index]
        if stage == "gate_up":
            own = torch.stack([_rows(bank, row, features) for row in own])
        shard.register_parameter(f"{name}_bias", torch.nn.Parameter(own, requires_grad=False))


def _rows(bank: ExpertBank, matrix: Tensor, features: tuple[int, int], each: int = 1) -> Tensor:
    """Return the rows of some features of gate and up; `each` features share one of them."""
    begin, end = features[0] // each, ceil_div(features[1], each)
    if bank.has_halves("gate_up"):
        return torch.cat([half[begin:end] for half in matrix.chunk(2)])
    per_feature = _rows_per_feature(bank)
    return matrix[per_feature * begin : per_feature * end]


def _cut_scale(bank: ExpertBank, stage: str, scale: Tensor, features: tuple[int, int]) -> Tensor:
    """Return the scales of some features."""
    layout = bank.plan.stage(stage).scales
    begin, end = features
    whole = features == (0, bank.intermediate_size)
    if whole or layout == "tensor" or (layout == "channel" and stage == "down"):
        return scale
    if stage == "down":
        return scale[:, :, begin // SCALE_BLOCK : ceil_div(end, SCALE_BLOCK)].contiguous()
    if layout == "channel":
        return torch.stack([_rows(bank, row, features) for row in scale])
    if not bank.has_halves(stage):
        each = _rows_per_feature(bank)
        return scale[
            :, each * begin // SCALE_BLOCK : ceil_div(each * end, SCALE_BLOCK)
        ].contiguous()
    grids = scale if scale.dim() == 4 else scale.reshape(scale.shape[0], 2, -1, scale.shape[2])
    cut = grids[:, :, begin // SCALE_BLOCK : ceil_div(end, SCALE_BLOCK)]
    return (cut.flatten(1, 2) if (end - begin) % SCALE_BLOCK == 0 else cut).contiguous()
