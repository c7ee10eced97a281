"""Every documented argument error of the grouped GEMMs, found on the host before any launch.

On the CPU it runs in each call; on CUDA the C++ op checks first, and this puts its refusals into
words. Sizes are read once, messages put together only when one is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext._configs import config_index
from moe_ext._expected_rows import check_expected_rows
from moe_ext._scales import Sizes, check_scale_layouts
from moe_ext._words import device_message, name_of

MAX_GROUPS = 4096
# The device counts rows, columns and tiles in 32 bits, with room for one tile past the end
# (csrc/grouped_gemm/checks.cpp).
MAX_SIZE = 2**31 - 1 - 1024
_ALIGNMENT_BYTES = 16
_BF16 = torch.bfloat16
_FP8 = torch.float8_e4m3fn
_FP32 = torch.float32
_INT32 = torch.int32


class Checked(NamedTuple):
    """What a call without a mistake gives."""

    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    dtype: str  # of the operands, and
    accumulate: str  # how they are summed, as dispatch names them
    config: int | None  # the kernel asked for


def check_grouped_gemm(
    op: str,
    out: Tensor | None,
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    *,
    masked: bool = False,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    scale_b_offset: Sequence[int] = (0, 0),
    n_segments: int = 1,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: str = "promoted",
    offs_ready: bool = False,  # nothing about it can be wrong
    config: str | None = None,
    expected_rows: int | None = None,
    has_memory: bool = True,
) -> Checked:
    """Raise a ValueError for the first argument that breaks the contract.

    `masked` is for `grouped_gemm_masked`, whose counts come as `offs`. `has_memory` is False for
    meta and fake tensors, whose addresses cannot be checked.
    """
    ends = "counts" if masked else "offs"
    if out is not None:
        out_dtype = _check_out_dtype(op, out, out_dtype)
    dtype = a.dtype
    if dtype is _FP8:
        name, item_bytes = "fp8", 1
        if accumulate not in ("promoted", "fast"):
            raise ValueError(f'{op}: `accumulate` must be "promoted" or "fast", got "{accumulate}"')
    elif dtype is _BF16:
        name, item_bytes = "bf16", 2
        if accumulate != "promoted":
            raise ValueError(
                f'{op}: `accumulate` must be "promoted" (the default) for bfloat16 operands, '
                f'which always accumulate in float32, got "{accumulate}"'
            )
    else:
        raise ValueError(f"{op}: `a` must be bfloat16 or float8_e4m3fn, got {name_of(dtype)}")
    if b.dtype is not dtype:
        raise ValueError(f"{op}: `b` must be {name_of(dtype)} to match `a`, got {name_of(b.dtype)}")
    if offs.dtype is not _INT32:
        raise ValueError(f"{op}: `{ends}` must be int32, got {name_of(offs.dtype)}")
    if out_dtype is None:
        out_dtype = _BF16
    elif out_dtype is not _BF16 and out_dtype is not _FP32:
        raise ValueError(f"{op}: `out_dtype` must be bfloat16 or float32, got {name_of(out_dtype)}")

    device = a.device
    if b.device != device:
        raise ValueError(device_message(op, "b", b, "a", a))
    if offs.device != device:
        raise ValueError(device_message(op, ends, offs, "a", a))

    a_shape, b_shape = a.shape, b.shape
    if len(a_shape) != (3 if masked else 2):
        form = "(num_groups, max_rows, k)" if masked else "(num_rows, k)"
        raise ValueError(f"{op}: `a` must have shape {form}, got {tuple(a_shape)}")
    if len(b_shape) != 3:
        raise ValueError(f"{op}: `b` must have shape (num_groups, n, k), got {tuple(b_shape)}")
    *rows, k = a_shape
    num_groups, n, b_k = b_shape
    if b_k != k:
        raise ValueError(
            f"{op}: `b` must have shape (num_groups, n, k) = (*, *, {k}) to match `a`, got "
            f"{tuple(b_shape)}"
        )
    if not 0 < num_groups <= MAX_GROUPS:
        raise ValueError(f"{op}: `b` must have 1 to {MAX_GROUPS} groups, got {num_groups}")
    if masked and rows[0] != num_groups:
        raise ValueError(
            f"{op}: `a` must have {num_groups} groups to match `b`, got shape {tuple(a_shape)}"
        )
    if offs.shape != (num_groups,):
        raise ValueError(
            f"{op}: `{ends}` must have shape (num_groups,) = ({num_groups},) to match `b`, "
            f"got {tuple(offs.shape)}"
        )
    n_multiple = 8 if out_dtype is _BF16 else 4
    if n % n_multiple:
        raise ValueError(
            f"{op}: `b` must have n a multiple of {n_multiple} for {name_of(out_dtype)} output, "
            f"got {n}"
        )

    _check_rows(op, "a", a, k, item_bytes)
    _check_rows(op, "b", b, k, item_bytes)
    if num_groups > 1 and offs.stride() != (1,):
        raise ValueError(f"{op}: `{ends}` must be contiguous, got stride {offs.stride()[0]}")
    if has_memory and (a.data_ptr() | b.data_ptr()) % _ALIGNMENT_BYTES:
        argument, tensor = ("a", a) if a.data_ptr() % _ALIGNMENT_BYTES else ("b", b)
        raise ValueError(_pointer_message(op, argument, tensor))

    for argument, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale is not None and (
            name == "bf16" or scale.dtype is not _FP32 or scale.device != device
        ):
            raise ValueError(_scale_message(op, argument, scale, a))
    sums = check_scale_layouts(
        op,
        scale_a,
        scale_b,
        scale_b_offset,
        n_segments,
        accumulate,
        Sizes(tuple(rows), num_groups, n, k),
    )
    if bias is not None:
        _check_bias(op, bias, a, num_groups, n)
    check_expected_rows(op, expected_rows)
    index = None if config is None else config_index(op, config, name, sums)
    if out is not None:
        _check_out(op, out, a, n, has_memory)
    return Checked((*rows, n), out_dtype, name, sums, index)


def _check_rows(op: str, argument: str, tensor: Tensor, row_elems: int, item_bytes: int) -> None:
    """Raise a ValueError unless TMA can describe the rows of `tensor`, (..., rows, row_elems)."""
    if tensor.numel() == 0:  # strides mean nothing
        return
    *outer, inner = tensor.stride()
    if (inner != 1 and row_elems > 1) or any(
        size > 1 and _bad_stride(stride, row_elems, item_bytes)
        for size, stride in zip(tensor.shape, outer, strict=False)
    ):
        raise ValueError(_stride_message(op, argument, tensor, row_elems, item_bytes))
    # Masked `a` and `out`: TMA sees the rows of all groups as one dimension.
    if argument != "b" and len(outer) == 2 and tensor.shape[0] > 1 and tensor.shape[1] > 1:
        rows = tensor.shape[1]
        if outer[0] != rows * outer[1] and row_elems > 0:
            raise ValueError(
                f"{op}: `{argument}` must have groups that follow each other without a gap, "
                f"{rows} x {outer[1]} elements apart, got strides {tensor.stride()}"
            )


def _check_bias(op: str, bias: Tensor, a: Tensor, num_groups: int, n: int) -> None:
    if bias.dtype is not _BF16 and bias.dtype is not _FP32:
        raise ValueError(f"{op}: `bias` must be bfloat16 or float32, got {name_of(bias.dtype)}")
    if bias.device != a.device:
        raise ValueError(device_message(op, "bias", bias, "a", a))
    if bias.shape != (num_groups, n):
        raise ValueError(
            f"{op}: `bias` must have shape (num_groups, n) = ({num_groups}, {n}), got "
            f"{tuple(bias.shape)}"
        )


def _check_out_dtype(op: str, out: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of `out`; raise a ValueError unless it is one the kernels write."""
    dtype = out.dtype
    if dtype is not _BF16 and dtype is not _FP32:
        raise ValueError(f"{op}: `out` must be bfloat16 or float32, got {name_of(dtype)}")
    if out_dtype is not None and out_dtype is not dtype:
        raise ValueError(
            f"{op}: `out_dtype` must be None or {name_of(dtype)} to match `out`, "
            f"got {name_of(out_dtype)}"
        )
    return dtype


def _check_out(op: str, out: Tensor, a: Tensor, n: int, has_memory: bool) -> None:
    """Raise a ValueError unless `out` can hold the result of a checked problem."""
    if out.device != a.device:
        raise ValueError(device_message(op, "out", out, "a", a))
    expected = (*a.shape[:-1], n)
    if out.shape != expected:
        form = "(num_rows, n)" if len(expected) == 2 else "(num_groups, max_rows, n)"
        raise ValueError(f"{op}: `out` must have shape {form} = {expected}, got {tuple(out.shape)}")
    _check_rows(op, "out", out, n, out.itemsize)
    if has_memory and out.data_ptr() % _ALIGNMENT_BYTES:
        raise ValueError(_pointer_message(op, "out", out))


def _bad_stride(stride: int, row_elems: int, item_bytes: int) -> bool:
    if row_elems == 0:  # no element: strides mean nothing
        return False
    return stride < row_elems or stride * item_bytes % _ALIGNMENT_BYTES != 0


def _stride_message(op: str, argument: str, tensor: Tensor, row_elems: int, item_bytes: int) -> str:
    padded = row_elems * item_bytes % _ALIGNMENT_BYTES and tensor.is_contiguous()
    hint = "; moe_ext.pad_rows makes such a copy" if padded else ""
    return (
        f"{op}: `{argument}` must have a contiguous last dimension and its other strides at least "
        f"{row_elems} and multiples of {_ALIGNMENT_BYTES // item_bytes} ({_ALIGNMENT_BYTES} "
        f"bytes), got strides {tensor.stride()} for shape {tuple(tensor.shape)}{hint}"
    )


def _pointer_message(op: str, argument: str, tensor: Tensor) -> str:
    hint = "" if argument == "out" else "; moe_ext.pad_rows makes such a copy"
    return (
        f"{op}: `{argument}` must begin at a multiple of {_ALIGNMENT_BYTES} bytes, "
        f"got an address {tensor.data_ptr() % _ALIGNMENT_BYTES} bytes past one{hint}"
    )


def _scale_message(op: str, argument: str, scale: Tensor, a: Tensor) -> str:
    if a.dtype is _BF16:
        return (
            f"{op}: `{argument}` must be None for bfloat16 operands, got shape {tuple(scale.shape)}"
        )
    if scale.dtype is not _FP32:
        return f"{op}: `{argument}` must be float32, got {name_of(scale.dtype)}"
    return device_message(op, argument, scale, "a", a)
