"""From a checkpoint's matrices to the tensors of `Experts`, one expert after the other."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moe_ext._scales import SCALE_BLOCK
from moe_ext.nn._options import MULTIPLE
from moe_ext.nn._pieces import FP8, LAYOUTS, Piece, Shard, cut_columns, cut_rows, quoted
from moe_ext.nn._store import empty_rows, join_scales, quantize_pieces, share_scale
from moe_ext.scales import pad_rows

STAGES = ("w13", "w2")


class Reader(Protocol):
    """A form of checkpoint."""

    num_experts: int

    def check(self, experts: range) -> tuple[int, int]:
        """Check shapes and dtypes; return hidden and intermediate size."""

    def matrices(self, stage: str, expert: int) -> tuple[Piece, ...]:
        """Return what is stacked to one expert's matrix of a stage."""

    def whole(self, stage: str) -> Tensor | None:
        """Return the weights of all experts, where the checkpoint has them as they are wanted."""

    def release(self, stage: str, expert: int, is_last: bool) -> None:
        """Let go of these."""


class Plan(NamedTuple):
    """What of a checkpoint is wanted, and how."""

    op: str
    experts: range
    intermediate_range: tuple[int, int] | None
    pad_blocks: bool
    quantize: str | None  # of `LAYOUTS`
    device: torch.device | str | None


def build(reader: Reader, plan: Plan) -> dict[str, Tensor]:
    """Return the tensors of `Experts` by name; those that there are not are left out.

    Everything is checked before anything is released.
    """
    hidden, intermediate = reader.check(plan.experts)
    for stage in STAGES:
        _check_alike(reader, plan, stage)
    shard = _shard(reader, plan, intermediate)
    for name, size in (("hidden", hidden), ("intermediate", shard.size)):
        if size % MULTIPLE:
            raise ValueError(
                f"{plan.op}: the {name} size must be a multiple of {MULTIPLE}, got {size}"
            )
    tensors: dict[str, Tensor] = {}
    for stage in STAGES:
        tensors |= _build_stage(reader, plan, shard, stage)
    return tensors


def _shard(reader: Reader, plan: Plan, intermediate: int) -> Shard:
    op = plan.op
    pieces = [piece for stage in STAGES for piece in reader.matrices(stage, plan.experts[0])]
    if plan.quantize is not None:
        if plan.quantize not in LAYOUTS:
            raise ValueError(
                f"{op}: `quantize` must be None or one of "
                f'{", ".join(map(quoted, LAYOUTS))}, got "{plan.quantize}"'
            )
        if pieces[0].weight.dtype is FP8:
            raise ValueError(
                f"{op}: `quantize` must be None where the weights are float8_e4m3fn already, got "
                f'"{plan.quantize}"'
            )
    begin, end = plan.intermediate_range or (0, intermediate)
    if not 0 <= begin < end <= intermediate:
        raise ValueError(
            f"{op}: `intermediate_range` must be (begin, end) with 0 <= begin < end <= "
            f"{intermediate}, the intermediate size, got {(begin, end)}"
        )
    blocks = any(piece.layout == "block" for piece in pieces)
    if (begin, end) != (0, intermediate) and not all(piece.divisible for piece in pieces):
        raise ValueError(
            f"{op}: `intermediate_range` must be None where gate and up share blocks of "
            f"{SCALE_BLOCK} x {SCALE_BLOCK} (intermediate size {intermediate}), got {(begin, end)}"
        )
    front = begin % SCALE_BLOCK if blocks else 0
    if front and not plan.pad_blocks:
        raise ValueError(
            f"{op}: `intermediate_range` must begin at a multiple of {SCALE_BLOCK} where scales "
            f"are per block, got {(begin, end)}; `pad_blocks=True` puts {front} features of zeros "
            "in front"
        )
    return Shard(begin, end, front, (begin, end) == (0, intermediate))


def _build_stage(reader: Reader, plan: Plan, shard: Shard, stage: str) -> dict[str, Tensor]:
    """Return weight, scale, bias and static scale of one GEMM."""
    first = reader.matrices(stage, plan.experts[0])
    device = first[0].weight.device if plan.device is None else torch.device(plan.device)
    dtype = FP8 if plan.quantize or first[0].weight.dtype is FP8 else torch.bfloat16
    packed = _adopted(reader, plan, shard, stage, device, dtype)
    is_copy = packed is None
    scales: list[tuple[Tensor, ...]] = []
    biases: list[Tensor] = []
    input_scales: list[Tensor] = []
    layout = None
    for index, expert in enumerate(plan.experts):
        pieces = _cut(reader.matrices(stage, expert), shard, stage)
        if plan.quantize is not None:
            pieces = quantize_pieces(pieces, plan.quantize, device)
        elif (
            len(pieces) == 2 and pieces[0].layout == "tensor" and pieces[0].input_scale is not None
        ):
            pieces = share_scale(pieces)
        if packed is None:
            rows = sum(_rows(piece, shard, stage) for piece in pieces)
            columns = pieces[0].weight.shape[1] + (shard.front if stage == "w2" else 0)
            shape = (len(plan.experts), rows, columns)
            packed = empty_rows(shape, dtype, device, zeros=shard.front > 0)
        if is_copy:
            _store(packed[index], pieces, shard, stage)
        if pieces[0].scale is not None:
            scales.append(tuple(_scale(p, shard, stage).to(device) for p in pieces))
        if pieces[0].bias is not None:
            biases.append(torch.cat([_bias(p, shard, stage).to(device) for p in pieces]))
        input_scales += [p.input_scale.float() for p in pieces if p.input_scale is not None]
        layout = pieces[0].layout
        del pieces
        reader.release(stage, expert, index == len(plan.experts) - 1)
    assert packed is not None
    tensors = {stage: packed}
    if scales:
        n = packed.shape[1]
        tensors[f"{stage}_scale"] = join_scales(scales, layout, n)
    if biases:
        tensors[f"{stage}_bias"] = torch.stack(biases)
    if input_scales:
        tensors[f"a{stage[1]}_scale"] = torch.stack(input_scales).amax().to(device)
    return tensors


def _adopted(
    reader: Reader, plan: Plan, shard: Shard, stage: str, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """Return the checkpoint's own tensor, where it can serve as it is."""
    whole = reader.whole(stage)
    if whole is None or whole.dtype is not dtype or whole.device != device:
        return None
    if plan.experts != range(whole.shape[0]) or not shard.is_whole:
        return None
    return whole if pad_rows(whole) is whole else None


def _cut(pieces: tuple[Piece, ...], shard: Shard, stage: str) -> tuple[Piece, ...]:
    cut = cut_rows if stage == "w13" else cut_columns
    # Pieces that hold gate and up without an end of the one are never cut.
    return tuple(cut(piece, shard) if piece.divisible else piece for piece in pieces)


def _check_alike(reader: Reader, plan: Plan, stage: str) -> None:
    """Raise a ValueError unless all matrices of a stage have the parts that the first one has."""
    first = reader.matrices(stage, plan.experts[0])[0]
    for expert in plan.experts:
        for piece in reader.matrices(stage, expert):
            for part, value, wanted in (
                ("bias", piece.bias is not None, first.bias is not None),
                ("input scale", piece.input_scale is not None, first.input_scale is not None),
            ):
                if value != wanted:
                    raise ValueError(
                        f"{plan.op}: `{piece.name}` must have {'an' if part[0] == 'i' else 'a'} "
                        f"{part} as `{first.name}` has, got none"
                        if wanted
                        else f"{plan.op}: `{piece.name}` must have no {part}, since `{first.name}` "
                        "has none, got one"
                    )
            if piece.input_scale is not None and piece.layout != "tensor":
                raise ValueError(
                    f"{plan.op}: `{piece.name}` must have no input scale unless its scale is per "
                    f"tensor, got one with a scale per {piece.layout}"
                )
            if piece.layout != first.layout:
                raise ValueError(
                    f"{plan.op}: `{piece.name}` must have a scale per {first.layout} to match "
                    f"`{first.name}`, got one per {piece.layout}"
                )


def _rows(piece: Piece, shard: Shard, stage: str) -> int:
    front = shard.front * piece.rows_per_feature if stage == "w13" else 0
    return piece.weight.shape[0] + front


def _store(packed: Tensor, pieces: tuple[Piece, ...], shard: Shard, stage: str) -> None:
    """Copy one expert's matrices to where they belong in (n, k)."""
    end = 0
    for piece in pieces:
        end += _rows(piece, shard, stage)
        rows, columns = piece.weight.shape
        packed[end - rows : end, packed.shape[1] - columns :].copy_(piece.weight)


def _scale(piece: Piece, shard: Shard, stage: str) -> Tensor:
    assert piece.scale is not None
    if piece.layout != "channel":
        return piece.scale
    return _behind(piece.scale, 1.0, piece, shard, stage)


def _bias(piece: Piece, shard: Shard, stage: str) -> Tensor:
    assert piece.bias is not None
    bias = piece.bias if piece.bias.dtype is torch.bfloat16 else piece.bias.float()
    return _behind(bias, 0.0, piece, shard, stage)


def _behind(tensor: Tensor, value: float, piece: Piece, shard: Shard, stage: str) -> Tensor:
    """Return one value for each row, those of the features in front first."""
    front = _rows(piece, shard, stage) - piece.weight.shape[0]
    return torch.cat([tensor.new_full((front,), value), tensor]) if front else tensor
