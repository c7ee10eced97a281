"""Quantising the matrices of an expert on the CPU at the speed of memory, to the reference's bits.

`quantize_fp8` on the CPU is the reference: every step is a pass over the whole tensor in float32.
Here BF16 is worked on 128 rows at a time, which the caches hold, and magnitudes are compared as
integers, in which the order of floating-point numbers of one sign is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ext._quantize_reference import scale_of
from moe_ext._scales import SCALE_BLOCK
from moe_ext.nn._pieces import Piece
from moe_ext.nn._store import quantize_pieces

_MAGNITUDE = 0x7FFF  # all bits of a BF16 number but its sign
_INFINITY = 0x7F80


def quantize_matrices(
    weights: Sequence[Tensor], layout: str, out: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Quantise the matrices of one stage of an expert, as `quantize_pieces` does.

    Args:
        weights: (n, k) each, on the CPU: gate and up, or one; contiguous.
        layout: "block", "channel" or "tensor", whose scale all of them share.
        out: float8_e4m3fn of the same shapes, contiguous; receive the values.

    Returns:
        The scales, float32: (ceil(n / 128), ceil(k / 128)), (n,) or () each.
    """
    scales = _scales(weights, layout) if weights[0].dtype is torch.bfloat16 else None
    if scales is None:
        pieces = quantize_pieces(
            tuple(Piece("", weight) for weight in weights), layout, torch.device("cpu")
        )
        for own, piece in zip(out, pieces, strict=True):
            own.copy_(piece.weight)
        return tuple(piece.scale for piece in pieces if piece.scale is not None)
    for weight, scale, own in zip(weights, scales, out, strict=True):
        _divide(weight, scale, layout, own)
    return scales


def _scales(weights: Sequence[Tensor], layout: str) -> tuple[Tensor, ...] | None:
    """Return the scales, None where something is not finite, which the reference deals with."""
    largest = [_largest(weight, layout) for weight in weights]
    if layout == "tensor":
        both = torch.stack(largest).amax()
        largest = [both] * len(weights)
    if any(bool((own >= _INFINITY).any()) for own in largest):
        return None
    return tuple(scale_of(own.view(torch.bfloat16).float()) for own in largest)


def _largest(weight: Tensor, layout: str) -> Tensor:
    """Return the bits of the largest magnitude of what shares a scale, int16."""
    found = []
    for rows in torch.split(weight.view(torch.int16), SCALE_BLOCK):
        magnitudes = rows & _MAGNITUDE
        found.append(magnitudes.amax(1 if layout == "channel" else 0))
    if layout == "channel":
        return torch.cat(found)
    if layout == "tensor":
        return torch.stack(found).amax()
    columns = torch.stack(found)
    short = -columns.shape[1] % SCALE_BLOCK
    blocks = torch.nn.functional.pad(columns, (0, short)).view(len(found), -1, SCALE_BLOCK)
    return blocks.amax(2)


def _divide(weight: Tensor, scale: Tensor, layout: str, out: Tensor) -> None:
    """Put a matrix over its scales: what has the largest magnitude becomes +-448, nothing more."""
    n, k = weight.shape
    if layout == "block":
        divisors = scale.repeat_interleave(SCALE_BLOCK, 1)[:, None, :k]
    elif layout == "channel":
        divisors = scale[:, None]
    quotients = torch.empty(min(n, SCALE_BLOCK), k)
    for index, (rows, own) in enumerate(
        zip(torch.split(weight, SCALE_BLOCK), torch.split(out, SCALE_BLOCK), strict=True)
    ):
        part = quotients[: rows.shape[0]]
        part.copy_(rows)
        if layout == "block":
            part /= divisors[index]
        elif layout == "channel":
            part /= divisors[index * SCALE_BLOCK :][: rows.shape[0]]
        else:
            # By a tensor with a dimension: a number's reciprocal would be multiplied by.
            part /= scale.reshape(1)
        own.copy_(part)
