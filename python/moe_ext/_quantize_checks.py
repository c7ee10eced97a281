"""Every documented argument error of `quantize_fp8`, and the shapes that its arguments ask for.

On CUDA the C++ op checks first, as for `grouped_gemm`, and this puts its refusals into words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext._math import ceil_div
from moe_ext._scales import SCALE_BLOCK
from moe_ext._words import device_message, name_of

GRANULARITIES = {"tensor": 0, "row": 1, "1x128": 2, "128x128": 3}
"""What `granularity` may be, and the number that the C++ op takes for it."""

ROW_ALIGNMENT = 16
"""Values of FP8 between the rows of `q`: what TMA asks of an operand of `grouped_gemm`."""

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_BLOCKS = 2**31 - 1 - 2**16  # the device counts in 32 bits, csrc/quantize/op.cpp


def scale_shape(granularity: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of an `x` of `shape`."""
    *groups, rows, k = shape
    along_k = ceil_div(k, SCALE_BLOCK)
    return {
        "tensor": (*groups,),
        "row": (*groups, rows),
        "1x128": (*groups, rows, along_k),
        "128x128": (*groups, ceil_div(rows, SCALE_BLOCK), along_k),
    }[granularity]


def check_quantize_fp8(
    op: str,
    outputs: tuple[Tensor, Tensor] | None,
    x: Tensor,
    granularity: str,
    *,
    scale: Tensor | None = None,
    num_valid_rows: Tensor | None = None,
    power_of_two: bool = False,
) -> None:
    """Raise a ValueError for the first argument that breaks the contract.

    `outputs` are `q` and `scale_out` of `quantize_fp8_out`.
    """
    if granularity not in GRANULARITIES:
        names = ", ".join(f'"{name}"' for name in GRANULARITIES)
        raise ValueError(f'{op}: `granularity` must be one of {names}, got "{granularity}"')
    if x.dtype not in INPUT_DTYPES:
        raise ValueError(f"{op}: `x` must be bfloat16, float16 or float32, got {name_of(x.dtype)}")
    if x.dim() not in (2, 3):
        raise ValueError(
            f"{op}: `x` must have shape (rows, k) or (groups, rows, k), got {tuple(x.shape)}"
        )
    _check_contiguous(op, "x", x)
    *groups, rows, k = x.shape
    num_blocks = ceil_div(k, SCALE_BLOCK) * rows * (groups[0] if groups else 1)
    if any(size > _MAX_BLOCKS for size in (num_blocks, *x.shape)):
        raise ValueError(
            f"{op}: `x` must have at most {_MAX_BLOCKS} blocks of 128 along k and sizes no larger, "
            f"got {num_blocks} for shape {tuple(x.shape)}"
        )
    if scale is not None:
        _check_static_scale(op, scale, x, granularity, power_of_two)
    if num_valid_rows is not None:
        _check_per_group(op, "num_valid_rows", num_valid_rows, torch.int32, x)
    if outputs is not None:
        _check_q(op, outputs[0], x)
        _check_scale_out(op, outputs[1], x, granularity)


def _check_static_scale(
    op: str, scale: Tensor, x: Tensor, granularity: str, power_of_two: bool
) -> None:
    if granularity != "tensor":
        raise ValueError(
            f'{op}: `scale` must be None for the granularity "{granularity}" (only "tensor" takes '
            f"one), got shape {tuple(scale.shape)}"
        )
    if power_of_two:
        raise ValueError(
            f"{op}: `power_of_two` must be False where `scale` is given and used as it is, got True"
        )
    _check_per_group(op, "scale", scale, torch.float32, x)


def _check_per_group(op: str, argument: str, tensor: Tensor, dtype: torch.dtype, x: Tensor) -> None:
    if tensor.dtype is not dtype:
        raise ValueError(
            f"{op}: `{argument}` must be {name_of(dtype)}, got {name_of(tensor.dtype)}"
        )
    _check_device(op, argument, tensor, x)
    if x.dim() == 3:
        shapes, said = ((x.shape[0],),), f"(groups,) = ({x.shape[0]},)"
    else:
        shapes, said = ((), (1,)), "() or (1,)"  # type: ignore[assignment]
    if tuple(tensor.shape) not in shapes:
        raise ValueError(
            f"{op}: `{argument}` must have shape {said} for {x.dim()}-D `x`, got "
            f"{tuple(tensor.shape)}"
        )


def _check_q(op: str, q: Tensor, x: Tensor) -> None:
    if q.dtype is not torch.float8_e4m3fn:
        raise ValueError(f"{op}: `q` must be float8_e4m3fn, got {name_of(q.dtype)}")
    _check_device(op, "q", q, x)
    if q.shape != x.shape:
        raise ValueError(
            f"{op}: `q` must have the shape {tuple(x.shape)} of `x`, got {tuple(q.shape)}"
        )
    _check_contiguous(op, "q", q)
    k = q.shape[-1]
    outer = zip(q.shape[:-1], q.stride()[:-1], strict=True)
    if any(size > 1 and stride < k for size, stride in outer):
        raise ValueError(
            f"{op}: `q` must have strides of at least {k} between its rows, got strides "
            f"{q.stride()} for shape {tuple(q.shape)}"
        )


def _check_scale_out(op: str, scale: Tensor, x: Tensor, granularity: str) -> None:
    if scale.dtype is not torch.float32:
        raise ValueError(f"{op}: `scale_out` must be float32, got {name_of(scale.dtype)}")
    _check_device(op, "scale_out", scale, x)
    shape = scale_shape(granularity, tuple(x.shape))
    if tuple(scale.shape) != shape and not (shape == () and scale.shape == (1,)):
        raise ValueError(
            f'{op}: `scale_out` must have shape {shape} for the granularity "{granularity}", got '
            f"{tuple(scale.shape)}"
        )


def _check_contiguous(op: str, argument: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride()[-1] != 1:
        raise ValueError(
            f"{op}: `{argument}` must have a contiguous last dimension, got strides "
            f"{tensor.stride()} for shape {tuple(tensor.shape)}"
        )


def _check_device(op: str, argument: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(device_message(op, argument, tensor, "x", x))
