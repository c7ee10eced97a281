"""A call of `quantize_fp8`: a good one goes to the C++ op at once, any other to the checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ext._cpu import warn_of_cpu
from moe_ext._library import device_kernels
from moe_ext._math import ceil_div
from moe_ext._quantize_checks import (
    GRANULARITIES,
    ROW_ALIGNMENT,
    check_quantize_fp8,
    scale_shape,
)
from moe_ext._quantize_reference import quantize_fp8_reference
from moe_ext._words import check_given

# CTAs an SM that look for the largest value of a tensor; what one of them reads at a time.
_CTAS_PER_SM = 6
_CTA_BYTES = 16384

Outputs = tuple[Tensor, Tensor]


def empty_outputs(x: Tensor, granularity: str, scale: Tensor | None) -> Outputs:
    """Allocate `q`, whose rows `grouped_gemm` takes, and the scales."""
    *outer, k = x.shape
    q = x.new_empty((*outer, ceil_div(k, ROW_ALIGNMENT) * ROW_ALIGNMENT), dtype=torch.float8_e4m3fn)
    shape = scale_shape(granularity, tuple(x.shape)) if scale is None else scale.shape
    scale_out = x.new_empty(shape, dtype=torch.float32)
    return q.narrow(-1, 0, k) if k % ROW_ALIGNMENT else q, scale_out


def _launch(
    outputs: Outputs | None,
    x: Tensor,
    granularity: str,
    scale: Tensor | None,
    num_valid_rows: Tensor | None,
    power_of_two: bool,
) -> Outputs | None:
    """Launch a CUDA call whose tensors only the C++ op has looked at.

    Raises its ValueError, or returns None, for a call that is refused or has nothing to launch.
    """
    number = GRANULARITIES.get(granularity)
    if number is None or x.dim() not in (2, 3) or x.numel() == 0:
        return None
    if scale is not None and (number != 0 or power_of_two):
        return None
    kernels = device_kernels(x.get_device())
    if outputs is None:
        outputs = empty_outputs(x, granularity, scale)
    partials = None
    if number == 0 and scale is None:
        groups = x.shape[0] if x.dim() == 3 else 1
        useful = ceil_div(x.numel() * x.itemsize, groups * _CTA_BYTES)
        most = max(1, _CTAS_PER_SM * kernels.sm_count // groups)
        partials = x.new_empty((groups, min(useful, most)), dtype=torch.float32)
    kernels.quantize_fp8_configured(
        x, *outputs, partials, scale, num_valid_rows, number, power_of_two
    )
    return outputs


def _run(
    op: str,
    outputs: Outputs | None,
    x: Tensor,
    granularity: str,
    *,
    scale: Tensor | None = None,
    num_valid_rows: Tensor | None = None,
    power_of_two: bool = False,
) -> Outputs:
    options = (granularity, scale, num_valid_rows, power_of_two)
    if x.is_cuda:
        try:
            result = _launch(outputs, x, *options)
        except ValueError:  # the checks below know the documented message
            result = None
        if result is not None:
            return result
    check_quantize_fp8(
        op,
        outputs,
        x,
        granularity,
        scale=scale,
        num_valid_rows=num_valid_rows,
        power_of_two=power_of_two,
    )
    if outputs is None:
        outputs = empty_outputs(x, granularity, scale)
    if not x.is_cuda:
        warn_of_cpu()
        _fill_on_cpu(outputs, x, *options)
        return outputs
    device_kernels(x.get_device())  # says what is missing even where there is nothing to launch
    if x.numel() == 0:
        scale_out = outputs[1]
        scale_out.fill_(1.0) if scale is None else scale_out.copy_(scale.reshape(scale_out.shape))
    else:
        _launch(outputs, x, *options)
    return outputs


def _fill_on_cpu(
    outputs: Outputs,
    x: Tensor,
    granularity: str,
    scale: Tensor | None,
    num_valid_rows: Tensor | None,
    power_of_two: bool,
) -> None:
    """Write the reference of the valid rows, group by group, and nothing else."""
    q, scale_out = outputs
    if x.dim() == 2:
        x, q = x[None], q[None]
        scale_out = scale_out.reshape(1) if granularity == "tensor" else scale_out[None]
        scale = None if scale is None else scale.reshape(1)
    groups, rows, _ = x.shape
    counts = [rows] * groups if num_valid_rows is None else num_valid_rows.reshape(-1).tolist()
    for group, count in enumerate(counts):
        valid = min(max(count, 0), rows)
        values, own = quantize_fp8_reference(
            x[group, :valid],
            granularity,
            scale=None if scale is None else scale[group],
            power_of_two=power_of_two,
        )
        q[group, :valid] = values
        if granularity == "tensor":
            scale_out[group] = own
        else:
            scale_out[group, : own.shape[0]] = own


def run_quantize_fp8(x: Tensor, granularity: str, **options: Any) -> Outputs:
    """Implement `moe_ext::quantize_fp8` for CPU and CUDA."""
    return _run("quantize_fp8", None, x, granularity, **options)


def run_quantize_fp8_out(
    x: Tensor, granularity: str, *, q: Tensor, scale_out: Tensor, **options: Any
) -> None:
    """Implement `moe_ext::quantize_fp8_out` for CPU and CUDA."""
    for argument, tensor in (("q", q), ("scale_out", scale_out)):
        check_given("quantize_fp8_out", argument, tensor)
    _run("quantize_fp8_out", (q, scale_out), x, granularity, **options)
