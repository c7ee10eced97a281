"""Checkpoints' scales and odd row lengths, brought to what `grouped_gemm` takes. Plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext._math import ceil_div

_ROW_BYTES = 16  # what TMA asks of rows
_PER_WORD = 4  # E8M0 scales in an int32


def scales_to_float32(scale: Tensor, *, num_columns: int | None = None) -> Tensor:
    """Convert scales of any common type to the float32 that `grouped_gemm` takes, exactly.

    Args:
        scale: any shape, strides and device. float32: returned as it is. bfloat16, float16: the
            same values. float8_e8m0fnu, or uint8 that holds its bits: 2**(e - 127), where 0 is
            2**-127 and 255 is NaN. int32: four E8M0 in each element, neighbours along the last
            dimension, the first in the lowest byte: (..., ceil(num_columns / 4)).
        num_columns: int32 only, and needed there: columns of the scales, without the padding of
            the last element.

    Returns:
        float32: the shape of `scale`, or (..., num_columns) for int32.

    Raises:
        ValueError: an argument differs from the above.

    Example:
        >>> scales_to_float32(torch.tensor([126, 127, 129], dtype=torch.uint8)).tolist()
        [0.5, 1.0, 4.0]
    """
    if not isinstance(scale, Tensor):
        raise ValueError(f"scales_to_float32: `scale` must be a tensor, got {type(scale).__name__}")
    if scale.dtype is torch.int32:
        return _from_e8m0(_unpack(scale, num_columns))
    if num_columns is not None:
        raise ValueError(
            "scales_to_float32: `num_columns` must be None but for int32 scales, got "
            f"{num_columns} for {str(scale.dtype).removeprefix('torch.')}"
        )
    if scale.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return scale.float()
    if scale.dtype is torch.float8_e8m0fnu:
        return _from_e8m0(scale.view(torch.uint8).int())
    if scale.dtype is torch.uint8:
        return _from_e8m0(scale.int())
    raise ValueError(
        "scales_to_float32: `scale` must be float32, bfloat16, float16, float8_e8m0fnu, uint8 or "
        f"int32, got {str(scale.dtype).removeprefix('torch.')}"
    )


def _unpack(scale: Tensor, num_columns: int | None) -> Tensor:
    """Return the bytes of int32 elements, one for each column."""
    if scale.dim() == 0:
        raise ValueError(
            "scales_to_float32: `scale` must have a last dimension where it is int32 (four scales "
            "in each element), got shape ()"
        )
    if type(num_columns) is not int or num_columns < 0:
        raise ValueError(
            "scales_to_float32: `num_columns` must be a number of columns for int32 scales (four "
            f"in each element of the last dimension), got {num_columns!r}"
        )
    if scale.shape[-1] != ceil_div(num_columns, _PER_WORD):
        raise ValueError(
            "scales_to_float32: `scale` must have ceil(num_columns / 4) = "
            f"{ceil_div(num_columns, _PER_WORD)} elements in its last dimension, got shape "
            f"{tuple(scale.shape)}"
        )
    shifts = torch.arange(0, 32, 32 // _PER_WORD, dtype=torch.int32, device=scale.device)
    return ((scale[..., None] >> shifts) & 0xFF).flatten(-2)[..., :num_columns]


def _from_e8m0(exponent: Tensor) -> Tensor:
    """Make powers of two from biased exponents, int32."""
    # 2**-127 is half the smallest normal number; 255 is NaN, not the infinity it would become.
    bits = torch.where(exponent == 0, 0x00400000, exponent << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def pad_rows(x: Tensor) -> Tensor:
    """Give rows of any length the 16-byte strides that `grouped_gemm` asks of its operands.

    Rows of FP8 weights with k = 232, 360 or 88 do not follow each other at multiples of 16 bytes.

    Args:
        x: (..., k), any dtype, device and strides.

    Returns:
        `x` itself where its last dimension is contiguous, it begins at a multiple of 16 bytes and
        its other strides are multiples of 16 bytes and at least k; else a copy: a view of the
        shape of `x` into a new tensor whose rows are padded (with uninitialised memory).

    Raises:
        ValueError: `x` has no dimension.

    Example:
        >>> pad_rows(torch.zeros(2, 360, dtype=torch.uint8)).stride()
        (368, 1)
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"pad_rows: `x` must be a tensor, got {type(x).__name__}")
    if x.dim() == 0:
        raise ValueError("pad_rows: `x` must have shape (..., k), got ()")
    if _has_aligned_rows(x):
        return x
    *outer, k = x.shape
    multiple = max(1, _ROW_BYTES // x.itemsize)
    padded = x.new_empty((*outer, ceil_div(k, multiple) * multiple))[..., :k]
    return padded.copy_(x)


def _has_aligned_rows(x: Tensor) -> bool:
    if x.numel() == 0:
        return True
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    if (x.shape[-1] > 1 and x.stride()[-1] != 1) or any(
        size > 1 and (stride * x.itemsize % _ROW_BYTES or stride < x.shape[-1])
        for size, stride in outer
    ):
        return False
    # Under torch.compile there is no address to look at, and a copy is always right.
    return not torch.compiler.is_compiling() and x.data_ptr() % _ROW_BYTES == 0
