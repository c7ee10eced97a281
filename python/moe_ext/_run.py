"""A call of `grouped_gemm`: a good one goes to the C++ op at once, any other to the checks."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ext._checks import check_grouped_gemm, check_out, check_out_dtype
from moe_ext._configs import config_index
from moe_ext._dispatch import select
from moe_ext._library import device_kernels
from moe_ext._scales import block_kind, has_blocks
from moe_ext.reference import grouped_gemm_reference

# What a call without a mistake looks up: (dtype of `a`, accumulate) -> dispatch's names of them.
_KINDS = {
    (torch.bfloat16, "promoted"): "bf16",
    (torch.float8_e4m3fn, "promoted"): "fp8",
    (torch.float8_e4m3fn, "fast"): "fp8",
}
_RESULTS = (torch.bfloat16, torch.float32)


def _launch(
    out: Tensor | None,
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    n_segments: int,
    n_offset: int,
    out_dtype: torch.dtype | None,
    accumulate: str,
    offs_ready: bool,
    config: str | None,
) -> Tensor | None:
    """Launch a CUDA call whose tensors only the C++ op has looked at; None if it is refused.

    The C++ op checks all that memory safety depends on, so a good call pays for one check. A
    refused one is checked again by `check_grouped_gemm`, which knows the documented messages.
    """
    kind = _KINDS.get((a.dtype, accumulate))
    if kind is None or (out_dtype is not None and (out is not None or out_dtype not in _RESULTS)):
        return None
    try:
        num_rows, k = a.shape
        num_groups, n, b_k = b.shape
        if num_rows == 0 or n == 0 or num_groups == 0 or b_k != k:
            return None
        kernels = device_kernels(a.get_device())
        if has_blocks(scale_a, scale_b, n, n_segments, n_offset):
            if accumulate != "promoted":
                return None
            accumulate = block_kind(n, n_segments, n_offset)
        if config is None:
            # By position: lru_cache looks keywords up more slowly.
            index = select(kind, accumulate, num_rows, num_groups, n, k, kernels.sm_count)
        else:
            index = config_index("grouped_gemm", config, kind, accumulate)
        if out is None:
            out = a.new_empty((num_rows, n), dtype=out_dtype or torch.bfloat16)
        kernels.grouped_gemm_configured(
            a, b, offs, scale_a, scale_b, out, offs_ready, n_segments, n_offset, index
        )
    except ValueError:
        return None
    return out


def _run(
    op: str,
    out: Tensor | None,
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    scale_b_offset: Sequence[int] = (0, 0),
    n_segments: int = 1,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: str = "promoted",
    offs_ready: bool = False,
    config: str | None = None,
) -> Tensor:
    n_offset, k_offset = scale_b_offset if len(scale_b_offset) == 2 else (0, 1)
    if a.is_cuda and bias is None and k_offset == 0:
        result = _launch(
            out,
            a,
            b,
            offs,
            scale_a,
            scale_b,
            n_segments,
            n_offset,
            out_dtype,
            accumulate,
            offs_ready,
            config,
        )
        if result is not None:
            return result
    num_rows, num_groups, n, k, device_index, dtype, sums, result_dtype, index = check_grouped_gemm(
        op,
        a,
        b,
        offs,
        scale_a,
        scale_b,
        scale_b_offset,
        n_segments,
        bias,
        out_dtype if out is None else check_out_dtype(op, out, out_dtype),
        accumulate,
        config,
    )
    if out is None:
        out = a.new_empty((num_rows, n), dtype=result_dtype)
    else:
        check_out(op, out, a, num_rows, n)
    if device_index < 0:
        _warn_of_cpu()
        return grouped_gemm_reference(
            a, b, offs, scale_a, scale_b, n_segments=n_segments, n_offset=n_offset, out=out
        )
    kernels = device_kernels(device_index)
    if num_rows == 0 or n == 0:
        return out
    if index is None:
        index = select(dtype, sums, num_rows, num_groups, n, k, kernels.sm_count)
    if sums.startswith("block"):  # these kernels load both scales
        scale_a = a.new_ones((), dtype=torch.float32) if scale_a is None else scale_a
        scale_b = a.new_ones((), dtype=torch.float32) if scale_b is None else scale_b
    kernels.grouped_gemm_configured(
        a, b, offs, scale_a, scale_b, out, offs_ready, n_segments, n_offset, index
    )
    return out


def run_grouped_gemm(a: Tensor, b: Tensor, offs: Tensor, **options: Any) -> Tensor:
    """Implement `moe_ext::grouped_gemm` for CPU and CUDA."""
    return _run("grouped_gemm", None, a, b, offs, **options)


def run_grouped_gemm_out(
    a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor, **options: Any
) -> None:
    """Implement `moe_ext::grouped_gemm_out` for CPU and CUDA."""
    if out is None:
        raise ValueError("grouped_gemm_out: `out` must be a tensor, got None")
    _run("grouped_gemm_out", out, a, b, offs, **options)


def _root_module(variables: dict[str, Any]) -> str:
    return str(variables.get("__name__", "")).partition(".")[0]


@functools.cache
def _warn_of_cpu() -> None:
    if torch.cuda.is_available():
        return
    # The caller's line, whichever way the call came through this package and torch.
    level, frame = 1, sys._getframe()
    while frame.f_back and _root_module(frame.f_globals) in ("moe_ext", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        "moe_ext: no CUDA device here, so its ops run the float32 reference on the CPU: right, but "
        "slow",
        stacklevel=level,
    )
