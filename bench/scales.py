"""FP8 scales of a cell in each layout, and their part in the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bench.problem import FP8_DEVIATION, StageInputs

# One word for both operands, or activations _x_ weights.
SCALES = (
    "tensor",
    "channel",
    "block128",
    "channel_x_tensor",
    "tensor_x_channel",
    "block128_x_tensor",
)
BLOCK = 128


class Scales(NamedTuple):
    """Dequantisation scales of one GEMM; `n_segments` is 2 where gate and up blocks are apart."""

    a: Tensor | None
    b: Tensor | None
    n_segments: int = 1


def split_kind(kind: str) -> tuple[str, str]:
    """Return the layouts of the activations' and of the weights' scales."""
    of_a, _, of_b = kind.partition("_x_")
    return of_a, of_b or of_a


def has_blocks(kind: str) -> bool:
    """Return whether scales change along k, so that every sum of 128 is scaled."""
    return "block128" in split_kind(kind)


def count_segments(stage: str, n: int, kind: str) -> int:
    """Return the parts of n with block grids of their own: gate and up where they are not whole
    blocks."""
    if split_kind(kind)[1] != "block128":
        return 1
    return 2 if stage == "gate_up" and n // 2 % BLOCK else 1


def make_scales(stage: StageInputs, kind: str) -> Scales:
    """Return scales that bring FP8 values to about 1, different wherever the layout lets them.

    Args:
        stage: The GEMM.
        kind: "none" (BF16) or one of `SCALES`. Of activations, for their rows of any layout:
            "tensor" (), "channel" (rows), "block128" (rows, ceil(k / 128)). Of weights: "tensor"
            (num_experts,), "channel" (num_experts, n), "block128" (num_experts, segments, blocks
            of n, ceil(k / 128)).
    """
    if kind == "none":
        return Scales(None, None)
    of_a, of_b = split_kind(kind)
    _, n, k = stage.b[0].shape
    segments = count_segments(stage.name, n, kind)
    return Scales(
        _scale_of_activations(of_a, stage.a.shape[:-1], k, stage.a.device),
        make_weight_scale(of_b, stage.b[0], segments),
        segments,
    )


def _spread(count: int, device: torch.device, *, scale: float = 1.0) -> Tensor:
    return torch.linspace(0.5 * scale, 1.5 * scale, count, device=device)


def _scale_of_activations(
    kind: str, row_shape: Sequence[int], k: int, device: torch.device
) -> Tensor:
    if kind == "tensor":
        return torch.tensor(1 / FP8_DEVIATION, device=device)
    of_rows = _spread(math.prod(row_shape), device, scale=1 / FP8_DEVIATION).view(*row_shape)
    if kind == "channel":
        return of_rows
    return of_rows[..., None] * _spread(-(-k // BLOCK), device).flip(0)


def make_weight_scale(kind: str, weights: Tensor, segments: int) -> Tensor:
    """Return the scale of weights (num_experts, n, k) as in `make_scales`; block grids begin anew
    in each of `segments` equal parts of n."""
    num_experts, n, k = weights.shape
    device = weights.device
    of_experts = _spread(num_experts, device, scale=1 / FP8_DEVIATION)
    if kind == "tensor":
        return of_experts
    if kind == "channel":
        return of_experts[:, None] * _spread(n, device)
    along_n, along_k = -(-n // segments // BLOCK), -(-k // BLOCK)
    blocks = _spread(segments * along_n, device)[:, None] * _spread(along_k, device)
    of_blocks = of_experts[:, None, None] * blocks
    return of_blocks.reshape(num_experts, segments, along_n, along_k)


def dequantise(
    stage: StageInputs, scales: Scales, rows: Tensor, group: int
) -> tuple[Tensor, Tensor]:
    """Return some rows of `a` and one expert's weights of copy 0 in fp32, scaled.

    Rows are counted over all dimensions of `a` before the last.
    """
    # As bytes: indexing by a tensor is not there for every 8-bit float on every device.
    a = stage.a.view(torch.uint8).flatten(0, -2)[rows].view(stage.a.dtype).float()
    b = stage.b[0][group].float()
    if scales.a is None or scales.b is None:
        return a, b
    of_rows = scales.a
    if of_rows.dim() > 0:
        of_rows = of_rows.flatten(0, stage.a.dim() - 2)[rows]
    if of_rows.dim() == 2:
        of_rows = of_rows.repeat_interleave(BLOCK, dim=1)[:, : a.shape[1]]
    elif of_rows.dim() == 1:
        of_rows = of_rows[:, None]
    of_weights = scales.b[group]
    if of_weights.dim() == 3:
        each = b.shape[0] // scales.n_segments
        by_row = of_weights.repeat_interleave(BLOCK, dim=1)[:, :each].flatten(0, 1)
        of_weights = by_row.repeat_interleave(BLOCK, dim=1)[:, : b.shape[1]]
    elif of_weights.dim() == 1:
        of_weights = of_weights[:, None]
    return a * of_rows, b * of_weights
