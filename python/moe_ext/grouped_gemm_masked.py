"""The ops `moe_ext::grouped_gemm_masked` and `grouped_gemm_masked_out`: a buffer for each group.

The layout of low-latency expert-parallel communication: buffers of a fixed size, and on the device
the number of rows that came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ext._call import call
from moe_ext._checks import check_grouped_gemm
from moe_ext._register import OPTIONS, register
from moe_ext._run import run_grouped_gemm_masked, run_grouped_gemm_masked_out


def grouped_gemm_masked(
    a: Tensor,
    b: Tensor,
    counts: Tensor,
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
    """Multiply the first rows of each group's buffer by the group's own matrix.

    out[g, i] = dequantised a[g, i] @ dequantised b[g].T + bias[g] for i < counts[g].

    Args:
        a: (num_groups, max_rows, k), otherwise as in `grouped_gemm`; groups follow each other
            without a gap: stride(0) is max_rows * stride(1).
        b: as in `grouped_gemm`, like all arguments but those below.
        counts: (num_groups,), int32, contiguous, same device. Rows of each group, 0 to max_rows.
            Never read by the host on CUDA.
        scale_a: float32, same device, any strides; FP8 only. () or (1,), (num_groups,),
            (num_groups, max_rows) or (num_groups, max_rows, 1), or (num_groups, max_rows,
            ceil(k / 128)). None is 1.
        scale_b: see `grouped_gemm`.
        scale_b_offset: see `grouped_gemm`.
        n_segments: see `grouped_gemm`.
        bias: see `grouped_gemm`.
        out_dtype: see `grouped_gemm`.
        accumulate: see `grouped_gemm`.
        offs_ready: see `grouped_gemm`, with `counts` for `offs`.
        config: see `grouped_gemm`.
        expected_rows: rows of an average group, for the choice of a kernel: the host cannot see
            `counts`. Any number gives the same result, bit for bit where it gives the same kernel.
            None is max_rows.

    Returns:
        (num_groups, max_rows, n), `out_dtype`, contiguous. Rows from counts[g] on are left
        unwritten (uninitialised memory); what `a` and `scale_a` hold there changes no result.

    Raises:
        ValueError: an argument differs from the above.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        As `grouped_gemm`: no synchronisation, safe in CUDA graphs, deterministic, and counts that
        break the contract are clamped.

    Example:
        >>> a, b = torch.ones(2, 4, 16).bfloat16(), torch.ones(2, 8, 16).bfloat16()
        >>> out = grouped_gemm_masked(a, b, torch.tensor([3, 0], dtype=torch.int32))
        >>> out.shape, out[0, 2, 0].item()
        (torch.Size([2, 4, 8]), 16.0)
    """
    result: Tensor = call(
        _OP,
        (a, b, counts),
        {
            "scale_a": scale_a,
            "scale_b": scale_b,
            "scale_b_offset": scale_b_offset,
            "n_segments": n_segments,
            "bias": bias,
            "out_dtype": out_dtype,
            "accumulate": accumulate,
            "offs_ready": offs_ready,
            "config": config,
            "expected_rows": expected_rows,
        },
    )
    return result


def grouped_gemm_masked_out(
    a: Tensor,
    b: Tensor,
    counts: Tensor,
    *,
    out: Tensor,
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
) -> None:
    """Multiply the first rows of each group's buffer by the group's own matrix, into `out`.

    out[g, i] = dequantised a[g, i] @ dequantised b[g].T + bias[g] for i < counts[g].

    Args:
        a: as in `grouped_gemm_masked`, like all arguments but the two below.
        b: see `grouped_gemm_masked`.
        counts: see `grouped_gemm_masked`.
        out: (num_groups, max_rows, n), bfloat16 or float32, same device as `a`, last dimension
            contiguous, rows 16-byte aligned, groups without a gap; under `torch.compile` contiguous
            altogether. Must not overlap the inputs (not checked).
        scale_a: see `grouped_gemm_masked`.
        scale_b: see `grouped_gemm_masked`.
        scale_b_offset: see `grouped_gemm_masked`.
        n_segments: see `grouped_gemm_masked`.
        bias: see `grouped_gemm_masked`.
        out_dtype: None, or the dtype of `out`.
        accumulate: see `grouped_gemm_masked`.
        offs_ready: see `grouped_gemm_masked`.
        config: see `grouped_gemm_masked`.
        expected_rows: see `grouped_gemm_masked`.

    Raises:
        ValueError: an argument differs from the above.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        Rows of `out` from counts[g] on keep what they held.
    """
    call(
        _OUT_OP,
        (a, b, counts),
        {
            "scale_a": scale_a,
            "scale_b": scale_b,
            "scale_b_offset": scale_b_offset,
            "n_segments": n_segments,
            "bias": bias,
            "out_dtype": out_dtype,
            "accumulate": accumulate,
            "offs_ready": offs_ready,
            "config": config,
            "expected_rows": expected_rows,
            "out": out,
        },
    )


def _fake(a: Tensor, b: Tensor, counts: Tensor, **options: Any) -> Tensor:
    form = check_grouped_gemm(
        "grouped_gemm_masked", None, a, b, counts, masked=True, **options, has_memory=False
    )
    return a.new_empty(form.out_shape, dtype=form.out_dtype)


def _out_fake(a: Tensor, b: Tensor, counts: Tensor, *, out: Tensor, **options: Any) -> None:
    check_grouped_gemm(
        "grouped_gemm_masked_out", out, a, b, counts, masked=True, **options, has_memory=False
    )


_OPTIONS = OPTIONS + ", int? expected_rows=None"
_OP = register(
    "grouped_gemm_masked",
    f"(Tensor a, Tensor b, Tensor counts, *, {_OPTIONS}) -> Tensor",
    run_grouped_gemm_masked,
    _fake,
)
_OUT_OP = register(
    "grouped_gemm_masked_out",
    f"(Tensor a, Tensor b, Tensor counts, *, {_OPTIONS}, Tensor(a!) out) -> ()",
    run_grouped_gemm_masked_out,
    _out_fake,
)
