"""A call of `combine_tokens`: a good one goes to the C++ op at once, any other to the checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ext._combine_checks import RESULTS, check_combine_tokens
from moe_ext._cpu import warn_of_cpu
from moe_ext._library import device_kernels
from moe_ext._tokens_reference import combine_tokens_reference
from moe_ext._words import FLOAT_MAX


def empty_output(y: Tensor, slot_row: Tensor, top_k: int, out_dtype: torch.dtype | None) -> Tensor:
    """Allocate the result."""
    shape = (slot_row.shape[0] // top_k, y.shape[1])
    return y.new_empty(shape, dtype=torch.bfloat16 if out_dtype is None else out_dtype)


def _launch(
    y: Tensor,
    slot_row: Tensor,
    topk_weights: Tensor | None,
    top_k: int,
    addend: Tensor | None,
    routed_scale: float,
    out_dtype: torch.dtype | None,
) -> Tensor | None:
    """Launch a CUDA call whose tensors only the C++ op has looked at.

    Raises its ValueError, or returns None, for a call that is refused.
    """
    if y.dim() != 2 or slot_row.dim() != 1 or top_k < 1:
        return None
    if out_dtype is not None and out_dtype not in RESULTS:
        return None
    if not abs(routed_scale) <= FLOAT_MAX:  # a NaN among them
        return None
    kernels = device_kernels(y.get_device())
    out = empty_output(y, slot_row, top_k, out_dtype)
    kernels.combine_tokens_configured(y, slot_row, topk_weights, addend, out, top_k, routed_scale)
    return out


def run_combine_tokens(
    y: Tensor,
    slot_row: Tensor,
    topk_weights: Tensor | None,
    *,
    top_k: int,
    addend: Tensor | None = None,
    routed_scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Implement `moe_ext::combine_tokens` for CPU and CUDA."""
    options: dict[str, Any] = {"top_k": top_k, "addend": addend, "routed_scale": routed_scale}
    if y.is_cuda:
        refused = None
        try:
            out = _launch(y, slot_row, topk_weights, top_k, addend, routed_scale, out_dtype)
        except ValueError as error:  # the checks below know the documented message
            out, refused = None, error
        if out is not None:
            return out
        check_combine_tokens(y, slot_row, topk_weights, out_dtype=out_dtype, **options)
        raise refused or AssertionError("a call that the checks accept is launched")
    check_combine_tokens(y, slot_row, topk_weights, out_dtype=out_dtype, **options)
    warn_of_cpu()
    dtype = torch.bfloat16 if out_dtype is None else out_dtype
    return combine_tokens_reference(y, slot_row, topk_weights, out_dtype=dtype, **options)
