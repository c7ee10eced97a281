"""FP8 scales of a cell in each layout, and their part in the reference."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bench.problem import FP8_DEVIATION, StageInputs

SCALES = ("tensor", "channel", "block128")
BLOCK = 128


class Scales(NamedTuple):
    """Dequantisation scales of one GEMM; `n_segments` is 2 where gate and up blocks are apart."""

    a: Tensor | None
    b: Tensor | None
    n_segments: int = 1


def count_segments(stage: str, n: int) -> int:
    """Return the parts of n with block grids of their own: gate and up where they are not whole
    blocks."""
    return 2 if stage == "gate_up" and n // 2 % BLOCK else 1


def make_scales(stage: StageInputs, kind: str) -> Scales:
    """Return scales that bring FP8 values to about 1, different wherever the layout lets them.

    Args:
        stage: The GEMM.
        kind: "none" (BF16), "tensor": () and (num_experts,), "channel": (num_rows,) and
            (num_experts, n), or "block128": (num_rows, ceil(k / 128)) and (num_experts, segments,
            blocks of n, ceil(k / 128)).
    """
    if kind == "none":
        return Scales(None, None)
    num_experts, n, k = stage.b[0].shape
    device = stage.a.device

    def spread(count: int, *, scale: float = 1.0) -> Tensor:
        return torch.linspace(0.5 * scale, 1.5 * scale, count, device=device)

    of_experts = spread(num_experts, scale=1 / FP8_DEVIATION)
    if kind == "tensor":
        return Scales(torch.tensor(1 / FP8_DEVIATION, device=device), of_experts)
    of_rows = spread(stage.a.shape[0], scale=1 / FP8_DEVIATION)
    if kind == "channel":
        return Scales(of_rows, of_experts[:, None] * spread(n))
    segments = count_segments(stage.name, n)
    along_n, along_k = -(-n // segments // BLOCK), -(-k // BLOCK)
    blocks = spread(segments * along_n)[:, None] * spread(along_k)
    of_blocks = of_experts[:, None, None] * blocks
    return Scales(
        of_rows[:, None] * spread(along_k).flip(0),
        of_blocks.reshape(num_experts, segments, along_n, along_k),
        segments,
    )


def dequantise(
    stage: StageInputs, scales: Scales, rows: Tensor, group: int
) -> tuple[Tensor, Tensor]:
    """Return some rows of `a` and one expert's weights of copy 0 in fp32, scaled."""
    # As bytes: indexing by a tensor is not there for every 8-bit float on every device.
    a = stage.a.view(torch.uint8)[rows].view(stage.a.dtype).float()
    b = stage.b[0][group].float()
    if scales.a is None or scales.b is None:
        return a, b
    of_rows = scales.a if scales.a.dim() == 0 else scales.a[rows]
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
