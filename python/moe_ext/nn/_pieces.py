"""One matrix of one expert, as a checkpoint has it: its parts, their checks, and cuts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext._math import ceil_div
from moe_ext._scales import SCALE_BLOCK
from moe_ext._words import name_of

FP8 = torch.float8_e4m3fn
UNQUANTIZED = (torch.bfloat16, torch.float32, torch.float16)
LAYOUTS = ("block", "channel", "tensor")
"""How weights share scales: 128 x 128, a row, all of an expert."""


class Piece(NamedTuple):
    """A matrix (n, k) with what belongs to it; views of the checkpoint."""

    name: str  # of the weight, in messages
    weight: Tensor  # (n, k)
    rows_per_feature: int = 1  # 2 where gate and up are one matrix
    scale: Tensor | None = None  # float32: "block" as below, "channel" (n,), "tensor" ()
    layout: str | None = None  # of `LAYOUTS`
    bias: Tensor | None = None  # (n,)
    input_scale: Tensor | None = None  # ()
    divisible: bool = True  # False where gate and up share blocks


class Shard(NamedTuple):
    """Intermediate features begin .. end, behind `front` features that are zero."""

    begin: int
    end: int
    front: int
    is_whole: bool  # whether these are all

    @property
    def size(self) -> int:
        """Features with the zeros."""
        return self.front + self.end - self.begin


def quoted(name: str) -> str:
    """Return a value of an argument as users write it."""
    return f'"{name}"'


def block_grid(n: int, k: int) -> tuple[int, int]:
    """Return how many blocks a matrix has along each dimension."""
    return ceil_div(n, SCALE_BLOCK), ceil_div(k, SCALE_BLOCK)


def classify_scale(op: str, name: str, scale: Tensor, n: int, k: int) -> tuple[Tensor, str]:
    """Return a scale in the shape of its layout, and the layout."""
    shape, grid = tuple(scale.shape), block_grid(n, k)
    if shape == grid and (name.endswith("scale_inv") or shape != (1, 1)):
        return scale, "block"
    if scale.numel() == 1:
        return scale.reshape(()), "tensor"
    if shape in ((n,), (n, 1)):
        return scale.reshape(n), "channel"
    raise ValueError(
        f"{op}: `{name}` must have shape () or (1,), ({n},), ({n}, 1) or, for blocks of "
        f"{SCALE_BLOCK} x {SCALE_BLOCK}, {grid}, got {shape}"
    )


def check_dtype(op: str, name: str, weight: Tensor, first_name: str, dtype: torch.dtype) -> None:
    """Raise a ValueError unless a weight can be stored and has the dtype of the first one."""
    if dtype is not FP8 and dtype not in UNQUANTIZED:
        raise ValueError(
            f"{op}: `{first_name}` must be bfloat16, float16, float32 or float8_e4m3fn, got "
            f"{name_of(dtype)}"
        )
    if weight.dtype is not dtype:
        raise ValueError(
            f"{op}: `{name}` must be {name_of(dtype)} to match `{first_name}`, got "
            f"{name_of(weight.dtype)}"
        )


def check_shape(op: str, name: str, tensor: Tensor, form: str, shape: tuple[int, ...]) -> None:
    """Raise a ValueError unless a tensor has a shape; `form` says it in words."""
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{op}: `{name}` must have shape {form} = {shape}, got {tuple(tensor.shape)}"
        )


def cut_rows(piece: Piece, shard: Shard) -> Piece:
    """Keep the rows of a shard's features."""
    each = piece.rows_per_feature
    rows = slice(each * shard.begin, each * shard.end)
    scale = piece.scale
    if scale is not None and piece.layout == "channel":
        scale = scale[rows]
    if scale is not None and piece.layout == "block":
        first = each * (shard.begin - shard.front) // SCALE_BLOCK
        scale = scale[first : ceil_div(each * shard.end, SCALE_BLOCK)]
    bias = None if piece.bias is None else piece.bias[rows]
    return piece._replace(weight=piece.weight[rows], scale=scale, bias=bias)


def cut_columns(piece: Piece, shard: Shard) -> Piece:
    """Keep the columns of a shard's features, and the bias where they are the first ones."""
    scale = piece.scale
    if scale is not None and piece.layout == "block":
        first = (shard.begin - shard.front) // SCALE_BLOCK
        scale = scale[:, first : ceil_div(shard.end, SCALE_BLOCK)]
    # Added once where the shards' results are summed.
    bias = piece.bias if shard.begin == 0 else None
    return piece._replace(weight=piece.weight[:, shard.begin : shard.end], scale=scale, bias=bias)
