"""What the quantise kernels must compute, bit for bit, in plain PyTorch: defined once, for all."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext._math import ceil_div
from moe_ext._reference_mode import without_autocast
from moe_ext._scales import SCALE_BLOCK

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_FLOAT_MAX = torch.finfo(torch.float32).max
_FLOAT_TINY = torch.finfo(torch.float32).tiny


def scale_of(largest: Tensor, power_of_two: bool = False) -> Tensor:
    """Return the scale that takes `largest` to the end of FP8's range; never zero or subnormal.

    Args:
        largest: float32, finite, at least 0. Zero has the scale 1.
        power_of_two: round the scale up to the next power of two.
    """
    # By a tensor: PyTorch multiplies by the rounded reciprocal of a number on CUDA.
    divisor = largest.new_full((), FP8_MAX)
    scale = torch.where(largest > 0, (largest / divisor).clamp_min(_FLOAT_TINY), 1.0)
    if power_of_two:
        # A mantissa other than zero carries into the exponent.
        scale = ((scale.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)
    return scale


def magnitudes(x: Tensor) -> Tensor:
    """Return what enters a scale: |x| in float32, NaN as 0 and infinity as the largest float."""
    return x.float().abs().nan_to_num(nan=0.0, posinf=_FLOAT_MAX)


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Divide and round to nearest even; saturates at +-448, and NaN becomes the positive NaN."""
    quotient = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX)
    return torch.where(x.isnan(), torch.nan, quotient).to(torch.float8_e4m3fn)


@without_autocast
def quantize_fp8_per_tensor(
    x: Tensor, num_leading_dims: int = 0, *, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise to FP8 E4M3 with one scale for the tensor, or one per leading index.

    Args:
        x: any shape, any floating dtype.
        num_leading_dims: dimensions that keep a scale of their own: 0 for activations, 1 for
            weights of shape (num_groups, n, k), which gives `scale_b` of shape (num_groups,).
        power_of_two: round scales up to powers of two.

    Returns:
        `q`, float8_e4m3fn, the shape of `x`, contiguous, and `scale`, float32,
        x.shape[:num_leading_dims]; `q * scale` approximates `x`. An all-zero or empty tensor
        has the scale 1.
    """
    shape = x.shape[:num_leading_dims]
    if x.numel() == 0:
        scale = torch.ones(shape, dtype=torch.float32, device=x.device)
        return x.to(torch.float8_e4m3fn).contiguous(), scale
    reduced = tuple(range(num_leading_dims, x.dim()))
    largest = magnitudes(x)
    if reduced:
        largest = largest.amax(dim=reduced, keepdim=True)
    scale = scale_of(largest, power_of_two)
    return to_fp8(x, scale).contiguous(), scale.reshape(shape)


@without_autocast
def quantize_fp8_per_block(
    x: Tensor, block: tuple[int, int], *, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise to FP8 E4M3 with one scale per block of the last two dimensions.

    Args:
        x: (..., rows, columns), any floating dtype.
        block: rows and columns of a block: (1, 128) for activations, (128, 128) for weights. The
            last block of either dimension may be short.
        power_of_two: round scales up to powers of two.

    Returns:
        `q`, float8_e4m3fn, the shape of `x`, contiguous, and `scale`, float32, (..., blocks of
        rows, blocks of columns); `q * scale` of its block approximates `x`. A block of zeros has
        the scale 1.
    """
    *leading, rows, columns = x.shape
    num_rows, num_columns = ceil_div(rows, block[0]), ceil_div(columns, block[1])
    padded = x.new_zeros((*leading, num_rows * block[0], num_columns * block[1])).float()
    padded[..., :rows, :columns] = x
    blocks = padded.reshape(*leading, num_rows, block[0], num_columns, block[1])
    scale = scale_of(magnitudes(blocks).amax(dim=(-1, -3), keepdim=True), power_of_two)
    q = to_fp8(blocks, scale).view(torch.uint8).reshape(padded.shape)
    return (
        q[..., :rows, :columns].contiguous().view(torch.float8_e4m3fn),
        scale.squeeze(-1).squeeze(-2),
    )


@without_autocast
def quantize_fp8_reference(
    x: Tensor, granularity: str, *, scale: Tensor | None = None, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise as `moe_ext.quantize_fp8` does, all rows, on the device of `x`.

    Args:
        x: (rows, k) or (groups, rows, k), any floating dtype, any strides.
        granularity: "tensor", "row", "1x128" or "128x128".
        scale: with "tensor", the scale to use: () or (1,), or (groups,).
        power_of_two: round scales up to powers of two.

    Returns:
        `q`, float8_e4m3fn, contiguous, and `scale`, float32, as `quantize_fp8` shapes them.
    """
    if scale is not None:
        by_group = scale.reshape(-1, *(1,) * (x.dim() - 1)) if x.dim() == 3 else scale.reshape(())
        return to_fp8(x, by_group).contiguous(), scale
    if granularity == "tensor":
        return quantize_fp8_per_tensor(x, x.dim() - 2, power_of_two=power_of_two)
    if granularity == "row":
        return quantize_fp8_per_tensor(x, x.dim() - 1, power_of_two=power_of_two)
    block = (1 if granularity == "1x128" else SCALE_BLOCK, SCALE_BLOCK)
    return quantize_fp8_per_block(x, block, power_of_two=power_of_two)
