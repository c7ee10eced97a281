"""A call of a grouped GEMM: a good one goes to a C++ op at once, any other to the checks.

The C++ op finds the kernel among those it has been told, allocates and launches. It refuses, by a
ValueError, what is wrong, what has nothing to launch, and problems it has been told no kernel for;
all of these are sorted out here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_ext._checks import Checked, check_grouped_gemm
from moe_ext._configs import config_indices
from moe_ext._cpu import warn_of_cpu
from moe_ext._dispatch import select
from moe_ext._expected_rows import rows_to_choose_for
from moe_ext._library import device_kernels
from moe_ext._words import check_given
from moe_ext.reference import grouped_gemm_reference

# Bits of the C++ op's `flags`, twins of those in csrc/grouped_gemm/op.hpp.
_MASKED, _OFFS_READY, _FP32_OUT, _FAST, _REMEMBER = (1 << bit for bit in range(5))
_BF16, _FP32 = torch.bfloat16, torch.float32
NO_OFFSET = (0, 0)


def _launch(
    flags: int,
    out: Tensor | None,
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    scale_b_offset: Sequence[int],
    n_segments: int,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    accumulate: str,
    offs_ready: bool,
    config: str | None,
    expected_rows: int | None,
) -> Tensor | None:
    """Launch a CUDA call that nothing has been checked of.

    The C++ op checks all that memory safety depends on, so a good call pays for one check. Raises
    its ValueError, or returns None, for a call that is refused.
    """
    if out_dtype is not None:
        if out_dtype is _FP32:
            flags |= _FP32_OUT
        if out is not None or (out_dtype is not _BF16 and out_dtype is not _FP32):
            return None
    if accumulate != "promoted":
        if accumulate != "fast":
            return None
        flags |= _FAST
    if offs_ready:
        flags |= _OFFS_READY
    kernels = device_kernels(a.get_device())
    # Two ops and as few arguments as will do: torch takes up to 0.3 us to read one.
    if scale_b_offset is NO_OFFSET and n_segments == 1 and expected_rows is None and config is None:
        if flags == 0 and bias is None and out is None:
            result: Tensor = kernels.grouped_gemm_launch(a, b, offs, scale_a, scale_b)
        else:
            result = kernels.grouped_gemm_launch(a, b, offs, scale_a, scale_b, bias, out, flags)
        return result
    if expected_rows is None:
        expected_rows = -1
    elif expected_rows < 0:
        return None
    index = -1 if config is None else config_indices().get(config)
    if index is None or (index >= 0 and a.numel() == 0):  # a kernel, but maybe nothing to launch
        return None
    n_offset, k_offset = scale_b_offset
    layout = n_segments, n_offset, k_offset, expected_rows
    options = scale_a, scale_b, bias, out, flags, *layout, index
    result = kernels.grouped_gemm_launch_with(a, b, offs, *options)
    return result


def _launch_checked(
    form: Checked,
    flags: int,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    scale_b_offset: Sequence[int],
    n_segments: int,
    bias: Tensor | None,
    accumulate: str,
    offs_ready: bool,
    expected_rows: int | None,
) -> None:
    """Launch a CUDA call that has passed the checks, and tell the C++ op which kernel it takes.

    Raises what only the C++ op looks at, such as the limits of TMA.
    """
    kernels = device_kernels(a.get_device())  # says what is missing even with nothing to launch
    if out.numel() == 0:
        return
    flags |= (_OFFS_READY if offs_ready else 0) | (_FAST if accumulate == "fast" else 0)
    *rows, k = a.shape
    num_groups, n, _ = b.shape
    index = form.config
    if index is None:
        if flags & _MASKED:
            rows[1] = rows_to_choose_for(expected_rows, rows[1])
        kind = form.dtype, form.accumulate
        index = select(*kind, math.prod(rows), num_groups, n, k, kernels.sm_count)
        flags |= _REMEMBER
    layout = n_segments, *scale_b_offset, -1 if expected_rows is None else expected_rows
    options = scale_a, scale_b, bias, out, flags, *layout, index
    kernels.grouped_gemm_launch_with(a, b, offs, *options)


def _check_and_run(
    op: str,
    flags: int,
    out: Tensor | None,
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    scale_b_offset: Sequence[int],
    n_segments: int,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    accumulate: str,
    offs_ready: bool,
    config: str | None,
    expected_rows: int | None,
) -> Tensor:
    """Run a call on the CPU, or one on CUDA that `_launch` was refused."""
    masked = bool(flags & _MASKED)
    for name, value in (("a", a), ("b", b), ("counts" if masked else "offs", offs)):
        check_given(op, name, value)
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
    _launch_checked(
        form,
        flags,
        out,
        a,
        b,
        offs,
        scale_a,
        scale_b,
        scale_b_offset,
        n_segments,
        bias,
        accumulate,
        offs_ready,
        expected_rows,
    )
    return out


def _implementation(
    op: str, *, masked: bool = False, writes_out: bool = False
) -> Callable[..., Tensor | None]:
    """Make the implementation of an op for CPU and CUDA; `offs` are counts where it is `masked`."""
    flags = _MASKED if masked else 0

    # Named, not collected, so that a call does not pack and unpack its options on the way.
    def run(
        a: Tensor,
        b: Tensor,
        offs: Tensor,
        *,
        out: Tensor | None = None,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
        scale_b_offset: Sequence[int] = NO_OFFSET,
        n_segments: int = 1,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        accumulate: str = "promoted",
        offs_ready: bool = False,
        config: str | None = None,
        expected_rows: int | None = None,
    ) -> Tensor | None:
        if writes_out and out is None:
            raise ValueError(f"{op}: `out` must be a tensor, got None")
        if a is None or b is None or offs is None or not a.is_cuda:
            result = None
        else:
            try:
                result = _launch(
                    flags,
                    out,
                    a,
                    b,
                    offs,
                    scale_a,
                    scale_b,
                    scale_b_offset,
                    n_segments,
                    bias,
                    out_dtype,
                    accumulate,
                    offs_ready,
                    config,
                    expected_rows,
                )
            except ValueError:  # the checks know the documented message
                result = None
        if result is None:
            result = _check_and_run(
                op,
                flags,
                out,
                a,
                b,
                offs,
                scale_a,
                scale_b,
                scale_b_offset,
                n_segments,
                bias,
                out_dtype,
                accumulate,
                offs_ready,
                config,
                expected_rows,
            )
        return None if writes_out else result

    return run


run_grouped_gemm = _implementation("grouped_gemm")
run_grouped_gemm_out = _implementation("grouped_gemm_out", writes_out=True)
run_grouped_gemm_masked = _implementation("grouped_gemm_masked", masked=True)
run_grouped_gemm_masked_out = _implementation(
    "grouped_gemm_masked_out", masked=True, writes_out=True
)
