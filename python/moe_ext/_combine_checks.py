"""Every documented argument error of `combine_tokens`; on CUDA the C++ op checks first."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext._sort_checks import MAX_TOP_K
from moe_ext._words import check_finite, device_message, name_of

RESULTS = (torch.bfloat16, torch.float32)
_ROW_BYTES = 16
_MAX_HIDDEN = 2**31 - 1


def check_combine_tokens(
    y: Tensor,
    slot_row: Tensor,
    topk_weights: Tensor | None,
    *,
    top_k: int,
    addend: Tensor | None = None,
    routed_scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    has_memory: bool = True,
) -> None:
    """Raise a ValueError for the first argument that breaks the contract.

    `has_memory` is False for tensors without addresses to look at.
    """
    if y.dtype is not torch.bfloat16:
        raise ValueError(f"combine_tokens: `y` must be bfloat16, got {name_of(y.dtype)}")
    if y.dim() != 2 or y.shape[1] % 8 or y.shape[1] > _MAX_HIDDEN:
        raise ValueError(
            "combine_tokens: `y` must have shape (num_rows, hidden_size) with hidden_size a "
            f"multiple of 8 below 2**31, got {tuple(y.shape)}"
        )
    _check_rows("y", y, has_memory)
    if not 1 <= top_k <= MAX_TOP_K:
        raise ValueError(f"combine_tokens: `top_k` must be in [1, {MAX_TOP_K}], got {top_k}")
    if slot_row.dtype is not torch.int32:
        raise ValueError(f"combine_tokens: `slot_row` must be int32, got {name_of(slot_row.dtype)}")
    _check_device("slot_row", slot_row, y)
    if slot_row.dim() != 1 or slot_row.shape[0] % top_k or not slot_row.is_contiguous():
        raise ValueError(
            f"combine_tokens: `slot_row` must have shape (num_tokens * top_k,) with top_k = {top_k}"
            f" and be contiguous, got shape {tuple(slot_row.shape)} and strides "
            f"{slot_row.stride()}"
        )
    num_tokens = slot_row.shape[0] // top_k
    if topk_weights is not None:
        _check_matrix("topk_weights", topk_weights, y, (num_tokens, top_k))
    if addend is not None:
        _check_matrix("addend", addend, y, (num_tokens, y.shape[1]))
        _check_rows("addend", addend, has_memory)
    check_finite("combine_tokens", "routed_scale", routed_scale)
    if out_dtype is not None and out_dtype not in RESULTS:
        raise ValueError(
            f"combine_tokens: `out_dtype` must be bfloat16 or float32, got {name_of(out_dtype)}"
        )


def _check_matrix(argument: str, tensor: Tensor, y: Tensor, shape: tuple[int, int]) -> None:
    if tensor.dtype not in RESULTS:
        raise ValueError(
            f"combine_tokens: `{argument}` must be bfloat16 or float32, got {name_of(tensor.dtype)}"
        )
    _check_device(argument, tensor, y)
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"combine_tokens: `{argument}` must have shape {shape} to match `y`, `slot_row` and "
            f"`top_k`, got {tuple(tensor.shape)}"
        )


def _check_rows(argument: str, tensor: Tensor, has_memory: bool) -> None:
    """Rows are read 16 bytes at a time."""
    if tensor.shape[0] == 0 or tensor.shape[1] == 0:
        return  # strides mean nothing
    if tensor.shape[1] > 1 and tensor.stride()[1] != 1:
        raise ValueError(
            f"combine_tokens: `{argument}` must have a contiguous last dimension, got strides "
            f"{tensor.stride()} for shape {tuple(tensor.shape)}"
        )
    row_elems = _ROW_BYTES // tensor.itemsize
    if tensor.shape[0] > 1 and tensor.stride()[0] % row_elems:
        raise ValueError(
            f"combine_tokens: `{argument}` must have a multiple of {row_elems} ({_ROW_BYTES} "
            f"bytes) between its rows, got strides {tensor.stride()}; `.contiguous()` makes such a "
            "copy"
        )
    if has_memory and tensor.data_ptr() % _ROW_BYTES:
        raise ValueError(
            f"combine_tokens: `{argument}` must begin at a multiple of {_ROW_BYTES} bytes, got an "
            f"address {tensor.data_ptr() % _ROW_BYTES} bytes past one; `.clone()` makes such a copy"
        )


def _check_device(argument: str, tensor: Tensor, y: Tensor) -> None:
    if tensor.device != y.device:
        raise ValueError(device_message("combine_tokens", argument, tensor, "y", y))
