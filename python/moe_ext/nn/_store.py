"""How weights and scales are stored: padded rows, shapes of scales, quantisation of one expert."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext._fused_moe_scales import block_shapes
from moe_ext._math import ceil_div
from moe_ext._scales import SCALE_BLOCK
from moe_ext.nn._pieces import FP8, Piece
from moe_ext.quantize import quantize_fp8

_ROW_BYTES = 16  # what TMA asks of rows
_GRANULARITY = {"block": "128x128", "channel": "row", "tensor": "tensor"}


def empty_rows(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str | None,
    zeros: bool = False,
) -> Tensor:
    """Allocate a tensor whose rows begin at multiples of 16 bytes."""
    *outer, k = shape
    multiple = _ROW_BYTES // dtype.itemsize
    allocate = torch.zeros if zeros else torch.empty
    return allocate((*outer, ceil_div(k, multiple) * multiple), dtype=dtype, device=device)[..., :k]


def scale_shape(layout: str, num_experts: int, n: int, k: int, halves: bool) -> tuple[int, ...]:
    """Return the shape of a weight's scale; `halves` is whether gate and up have grids apart."""
    if layout == "tensor":
        return (num_experts,)
    if layout == "channel":
        return (num_experts, n)
    whole, segments = block_shapes(num_experts, n, k)
    return segments if halves and n // 2 % SCALE_BLOCK else whole


def join_scales(scales: list[tuple[Tensor, ...]], layout: str | None, n: int) -> Tensor:
    """Stack the scales of all experts, each a tuple with one or with gate's and up's."""
    if layout == "tensor":
        if all(_same(*own) for own in scales):
            return torch.stack([own[0] for own in scales])
        layout = "channel"  # exact, and hidden rows get a scale each
        scales = [tuple(scale.expand(n // len(own)) for scale in own) for own in scales]
    if layout == "channel" or len(scales[0]) == 1:
        return torch.stack([torch.cat(own) for own in scales])
    if n // 2 % SCALE_BLOCK:
        return torch.stack([torch.stack(own) for own in scales])
    return torch.stack([torch.cat(own) for own in scales])


def _same(first: Tensor, *others: Tensor) -> bool:
    return all(other is first or bool(other == first) for other in others)


def quantize_pieces(
    pieces: tuple[Piece, ...], layout: str, device: torch.device
) -> tuple[Piece, ...]:
    """Bring an expert's matrix to FP8 on a device."""
    granularity = _GRANULARITY[layout]
    weights = [piece.weight.to(device).contiguous() for piece in pieces]
    if layout == "block":
        quantized = [quantize_fp8(weight, granularity) for weight in weights]
        return tuple(
            piece._replace(weight=q, scale=scale, layout=layout)
            for piece, (q, scale) in zip(pieces, quantized, strict=True)
        )
    q, scale = quantize_fp8(torch.cat(weights), granularity)
    lengths = [weight.shape[0] for weight in weights]
    scales = torch.split(scale, lengths) if layout == "channel" else [scale] * len(pieces)
    return tuple(
        piece._replace(weight=part, scale=own, layout=layout)
        for piece, part, own in zip(pieces, torch.split(q, lengths), scales, strict=True)
    )


def share_scale(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Bring gate and up to the larger of their scales, as one static scale asks of them."""
    scales = torch.stack([piece.scale for piece in pieces if piece.scale is not None])
    largest = scales.amax()
    return tuple(
        piece._replace(
            weight=piece.weight
            if _same(largest, scale)
            else (piece.weight.float() * (scale / largest)).to(FP8),
            scale=largest,
        )
        for piece, scale in zip(pieces, scales, strict=True)
    )
