"""FP8 in float32: weights and rows of one expert as `fused_moe` has them after quantising."""

from __future__ import annotations

from torch import Tensor

from moe_ext._activations import ACTIVATIONS, INTERLEAVED
from moe_ext._quantize_reference import quantize_fp8_reference
from moe_ext._scales import SCALE_BLOCK

_WEIGHTS = {"block": "128x128", "channel": "row", "tensor": "tensor"}
_ROWS = {"block": "1x128", "channel": "row", "tensor": "row"}


def has_halves(activation: str, gate_up_layout: str) -> bool:
    """Whether `w13` holds gate rows, then up rows, which have blocks of their own."""
    return ACTIVATIONS[activation].gated and gate_up_layout != INTERLEAVED


def fp8_weight(weight: Tensor, layout: str, halves: bool = False) -> Tensor:
    """Return an expert's weight (n, k) in float32 as FP8 has it, quantised as `Experts` does it."""
    parts = weight.chunk(2) if halves and layout == "block" else (weight,)
    dense = weight.new_empty(weight.shape).float()
    for part, out in zip(parts, dense.chunk(len(parts)), strict=True):
        q, scale = quantize_fp8_reference(part, _WEIGHTS[layout])
        _dequantize_into(out, q, scale, SCALE_BLOCK)
    return dense


def fp8_rows(x: Tensor, layout: str) -> Tensor:
    """Return activations (rows, k) in float32 as FP8 has them where a weight has a layout."""
    q, scale = quantize_fp8_reference(x, _ROWS[layout])
    dense = x.new_empty(x.shape).float()
    _dequantize_into(dense, q, scale, 1)
    return dense


def _dequantize_into(out: Tensor, q: Tensor, scale: Tensor, block_rows: int) -> None:
    out.copy_(q)
    if scale.dim() < 2:  # of the tensor, or of each row
        out.mul_(scale if scale.dim() == 0 else scale[:, None])
        return
    rows, columns = out.shape
    by_row = scale.repeat_interleave(block_rows, 0)[:rows]
    whole = columns // SCALE_BLOCK * SCALE_BLOCK  # the last block may be short
    blocks = out[:, :whole].unflatten(1, (-1, SCALE_BLOCK))  # type: ignore[no-untyped-call]
    blocks.mul_(by_row[:, : whole // SCALE_BLOCK, None])
    if whole < columns:
        out[:, whole:].mul_(by_row[:, -1:])
