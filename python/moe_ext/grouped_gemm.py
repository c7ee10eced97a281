"""The ops `moe_ext::grouped_gemm` and `grouped_gemm_out`: contract and registration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ext._call import call_straight
from moe_ext._checks import check_grouped_gemm
from moe_ext._register import OPTIONS, register
from moe_ext._run import NO_OFFSET, run_grouped_gemm, run_grouped_gemm_out


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    scale_b_offset: Sequence[int] = NO_OFFSET,
    n_segments: int = 1,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: str = "promoted",
    offs_ready: bool = False,
    config: str | None = None,
) -> Tensor:
    """Multiply each group of rows of `a` by its own matrix.

    out[i] = dequantised a[i] @ dequantised b[g].T + bias[g] for the rows i of group g. The rows of
    group g are offs[g - 1] to offs[g], the convention of `torch.nn.functional.grouped_mm`.

    Args:
        a: (num_rows, k), bfloat16 or float8_e4m3fn, K contiguous, rows 16-byte aligned and not
            overlapping; CUDA, or CPU for the slow reference. Rows sorted by group. k may be 0, and
            need not be a multiple of 16 bytes if the strides are (`moe_ext.pad_rows`).
        b: (num_groups, n, k), same dtype and device, K contiguous, rows 16-byte aligned; may be a
            view of a larger tensor. 1 to 4,096 groups; n a multiple of 8 (bfloat16 out) or 4
            (float32 out).
        offs: (num_groups,), int32, contiguous, same device. End row of each group, not decreasing,
            at most num_rows; equal neighbours make an empty group. Never read by the host on CUDA.
        scale_a: float32, same device, any strides; FP8 only. () or (1,), (num_rows,) or
            (num_rows, 1), or one for each 128 of a row: (num_rows, ceil(k / 128)). None is 1.
        scale_b: float32, same device, any strides; FP8 only. () or (1,), (num_groups,), one per
            channel (num_groups, n) or (num_groups, n, 1), or one per block of 128 x 128:
            (num_groups, ceil(n / 128), ceil(k / 128)); the last block of either dimension may be
            short. None is 1.
        scale_b_offset: (n0, k0), 0 to 127 each: the first block along n of each segment lacks its
            first n0 rows, the first along k its first k0 elements, as in a shard that begins
            inside a block. A segment then has ceil((n0 + n / n_segments) / 128) blocks, a row
            ceil((k0 + k) / 128). k0 other than 0 costs up to twice the tensor core's time.
        n_segments: 2 where the halves of n (gate and up) have block grids of their own: scale_b
            (num_groups, 2, ceil(n / 2 / 128), ceil(k / 128)), or with its two middle dimensions
            in one.
        bias: (num_groups, n), bfloat16 or float32, same device, any strides. Added in float32 to
            each row of a group, after scaling. None is 0.
        out_dtype: torch.bfloat16 (the default) or torch.float32.
        accumulate: FP8 only. "promoted" adds the tensor core's 14-bit sums into float32 at least
            every 128 of K, after multiplying them by their scales where those are per block;
            "fast" does not, and is refused with scales per block. BF16 always accumulates in
            float32.
        offs_ready: promises that `offs` and `b` were final before the previous kernel on this
            stream began, so that this one may start to load weights while that one still runs.
            True for the second GEMM of a layer.
        config: id of the compiled kernel to run, one of `moe_ext.kernels()`; None lets the
            dispatcher choose.

    Returns:
        (num_rows, n), `out_dtype`, contiguous. Accumulated in float32, rounded once. Rows past the
        last offset are left unwritten (uninitialised memory).

    Raises:
        ValueError: an argument differs from the above; the message has what was expected and what
            came.
        RuntimeError: the CUDA library cannot run here (not installed, wrong GPU, old driver or
            torch).

    Notes:
        Does not synchronise on CUDA; safe in CUDA graphs (sizes fixed, offsets may change between
        replays). Deterministic. Offsets that break the contract give unspecified values, never an
        access outside the tensors. Inputs that require grad are accepted, backward raises:
        inference only.

    Example:
        >>> a, b = torch.ones(5, 16).bfloat16(), torch.ones(2, 8, 16).bfloat16()
        >>> out = grouped_gemm(a, b, torch.tensor([2, 5], dtype=torch.int32))
        >>> out.shape, out[0, 0].item()
        (torch.Size([5, 8]), 16.0)
    """
    options: dict[str, Any] = {
        "scale_a": scale_a,
        "scale_b": scale_b,
        "n_segments": n_segments,
        "bias": bias,
        "out_dtype": out_dtype,
        "accumulate": accumulate,
        "offs_ready": offs_ready,
        "config": config,
    }
    if scale_b_offset is not NO_OFFSET:
        options["scale_b_offset"] = scale_b_offset
    operands = (a, b, offs)
    result: Tensor = call_straight(_OP, run_grouped_gemm, operands, options)
    return result


def grouped_gemm_out(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    *,
    out: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    scale_b_offset: Sequence[int] = NO_OFFSET,
    n_segments: int = 1,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: str = "promoted",
    offs_ready: bool = False,
    config: str | None = None,
) -> None:
    """Multiply each group of rows of `a` by its own matrix, into `out`.

    out[i] = dequantised a[i] @ dequantised b[g].T + bias[g] for the rows i of group g.

    Args:
        a: as in `grouped_gemm`, like all arguments but the two below.
        b: see `grouped_gemm`.
        offs: see `grouped_gemm`.
        out: (num_rows, n), bfloat16 or float32, same device as `a`, last dimension contiguous, rows
            16-byte aligned; under `torch.compile` contiguous altogether, which it asks of every
            `out`. Must not overlap the inputs (not checked).
        scale_a: see `grouped_gemm`.
        scale_b: see `grouped_gemm`.
        scale_b_offset: see `grouped_gemm`.
        n_segments: see `grouped_gemm`.
        bias: see `grouped_gemm`.
        out_dtype: None, or the dtype of `out`.
        accumulate: see `grouped_gemm`.
        offs_ready: see `grouped_gemm`.
        config: see `grouped_gemm`.

    Raises:
        ValueError: an argument differs from the above.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        Rows of `out` past the last offset keep what they held. Otherwise as `grouped_gemm`.
    """
    options: dict[str, Any] = {
        "scale_a": scale_a,
        "scale_b": scale_b,
        "n_segments": n_segments,
        "bias": bias,
        "out_dtype": out_dtype,
        "accumulate": accumulate,
        "offs_ready": offs_ready,
        "config": config,
        "out": out,
    }
    if scale_b_offset is not NO_OFFSET:
        options["scale_b_offset"] = scale_b_offset
    operands = (a, b, offs)
    call_straight(
        _OUT_OP,
        run_grouped_gemm_out,
        operands,
        options,
        written=(out,),
    )


def _fake(a: Tensor, b: Tensor, offs: Tensor, **options: Any) -> Tensor:
    form = check_grouped_gemm("grouped_gemm", None, a, b, offs, **options, has_memory=False)
    return a.new_empty(form.out_shape, dtype=form.out_dtype)


def _out_fake(a: Tensor, b: Tensor, offs: Tensor, *, out: Tensor, **options: Any) -> None:
    check_grouped_gemm("grouped_gemm_out", out, a, b, offs, **options, has_memory=False)


_OP = register(
    "grouped_gemm",
    f"(Tensor a, Tensor b, Tensor offs, *, {OPTIONS}) -> Tensor",
    run_grouped_gemm,
    _fake,
)
_OUT_OP = register(
    "grouped_gemm_out",
    f"(Tensor a, Tensor b, Tensor offs, *, {OPTIONS}, Tensor(a!) out) -> ()",
    run_grouped_gemm_out,
    _out_fake,
)
