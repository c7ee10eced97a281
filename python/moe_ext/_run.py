"""A call of a grouped GEMM: a good one goes to the C++ op at once, any other to the checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ext._checks import check_grouped_gemm
from moe_ext._configs import config_index
from moe_ext._cpu import warn_of_cpu
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
    masked: bool,
    out: Tensor | None,
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    n_segments: int,
    n_offset: int,
    k_offset: int,
    out_dtype: torch.dtype | None,
    accumulate: str,
    offs_ready: bool,
    config: str | None,
    expected_rows: int | None,
) -> Tensor | None:
    """Launch a CUDA call whose tensors only the C++ op has looked at.

    The C++ op checks all that memory safety depends on, so a good call pays for one check. Raises
    its ValueError, or returns None, for a call that is refused or has nothing to launch.
    """
    kind = _KINDS.get((a.dtype, accumulate))
    if kind is None or (out_dtype is not None and (out is not None or out_dtype not in _RESULTS)):
        return None
    num_groups, n, b_k = b.shape
    if masked:
        _, max_rows, k = a.shape
        num_rows = num_groups * max_rows
        if scale_a is not None and scale_a.dim() == 1 and scale_a.shape[0] == num_groups:
            scale_a = scale_a[:, None].expand(num_groups, max_rows)  # one for each group
    else:
        num_rows, k = a.shape
    if num_rows == 0 or n == 0 or num_groups == 0 or b_k != k:
        return None
    kernels = device_kernels(a.get_device())
    if has_blocks(scale_a, scale_b, n, n_segments, n_offset, k_offset, 2 if masked else 1):
        if accumulate != "promoted":
            return None
        accumulate = block_kind(n, n_segments, n_offset, k_offset)
        # These kernels load both scales.
        scale_a = a.new_ones((), dtype=torch.float32) if scale_a is None else scale_a
        scale_b = a.new_ones((), dtype=torch.float32) if scale_b is None else scale_b
    if config is None:
        if expected_rows is not None:
            if expected_rows < 0:
                return None
            num_rows = num_groups * max(1, min(expected_rows, max_rows))
        # By position: lru_cache looks keywords up more slowly.
        index = select(kind, accumulate, num_rows, num_groups, n, k, kernels.sm_count)
    else:
        index = config_index("grouped_gemm", config, kind, accumulate)
    if out is None:
        shape = (num_groups, max_rows, n) if masked else (num_rows, n)
        out = a.new_empty(shape, dtype=out_dtype or torch.bfloat16)
    kernels.grouped_gemm_configured(
        a,
        b,
        offs,
        scale_a,
        scale_b,
        bias,
        out,
        offs_ready,
        n_segments,
        n_offset,
        k_offset,
        index,
    )
    return out


def _run(
    op: str,
    masked: bool,
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
    expected_rows: int | None = None,
) -> Tensor:
    if a is None or b is None or offs is None:
        names = ("a", "b", "counts" if masked else "offs")
        missing = next(
            name for name, value in zip(names, (a, b, offs), strict=True) if value is None
        )
        raise ValueError(f"{op}: `{missing}` must be a tensor, got None")
    if a.is_cuda and len(scale_b_offset) == 2:
        n_offset, k_offset = scale_b_offset
        try:
            result = _launch(
                masked,
                out,
                a,
                b,
                offs,
                scale_a,
                scale_b,
                bias,
                n_segments,
                n_offset,
                k_offset,
                out_dtype,
                accumulate,
                offs_ready,
                config,
                expected_rows,
            )
        except ValueError:  # the checks below know the documented message
            result = None
        if result is not None:
            return result
    form = check_grouped_gemm(
        op,
        out,
        a,
        b,
        offs,
        masked=masked,
        scale_a=scale_a,
        scale_b=scale_b,
        scale_b_offset=scale_b_offset,
        n_segments=n_segments,
        bias=bias,
        out_dtype=out_dtype,
        accumulate=accumulate,
        config=config,
        expected_rows=expected_rows,
    )
    if out is None:
        out = a.new_empty(form.out_shape, dtype=form.out_dtype)
    if not a.is_cuda:
        warn_of_cpu()
        return grouped_gemm_reference(
            a,
            b,
            offs,
            scale_a,
            scale_b,
            bias=bias,
            n_segments=n_segments,
            scale_b_offset=scale_b_offset,
            out=out,
        )
    device_kernels(a.get_device())  # says what is missing even where there is nothing to launch
    # Raises what only the C++ op looks at, such as the limits of TMA.
    _launch(
        masked,
        out,
        a,
        b,
        offs,
        scale_a,
        scale_b,
        bias,
        n_segments,
        scale_b_offset[0],
        scale_b_offset[1],
        None,  # `out` has it
        accumulate,
        offs_ready,
        config,
        expected_rows,
    )
    return out


def run_grouped_gemm(a: Tensor, b: Tensor, offs: Tensor, **options: Any) -> Tensor:
    """Implement `moe_ext::grouped_gemm` for CPU and CUDA."""
    return _run("grouped_gemm", False, None, a, b, offs, **options)


def run_grouped_gemm_out(
    a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor, **options: Any
) -> None:
    """Implement `moe_ext::grouped_gemm_out` for CPU and CUDA."""
    if out is None:
        raise ValueError("grouped_gemm_out: `out` must be a tensor, got None")
    _run("grouped_gemm_out", False, out, a, b, offs, **options)


def run_grouped_gemm_masked(a: Tensor, b: Tensor, counts: Tensor, **options: Any) -> Tensor:
    """Implement `moe_ext::grouped_gemm_masked` for CPU and CUDA."""
    return _run("grouped_gemm_masked", True, None, a, b, counts, **options)


def run_grouped_gemm_masked_out(
    a: Tensor, b: Tensor, counts: Tensor, *, out: Tensor, **options: Any
) -> None:
    """Implement `moe_ext::grouped_gemm_masked_out` for CPU and CUDA."""
    if out is None:
        raise ValueError("grouped_gemm_masked_out: `out` must be a tensor, got None")
    _run("grouped_gemm_masked_out", True, out, a, b, counts, **options)
