"""What the kernels must compute, in plain fp32 PyTorch: for tests, benchmarks and the CPU.

Needs PyTorch's default `torch.set_float32_matmul_precision("highest")` to be exact to fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def group_rows(offs: Tensor, num_rows: int) -> list[tuple[int, int]]:
    """List each group's rows as (begin, end), clamped into the tensor as the kernels do it.

    Args:
        offs: (num_groups,), int32, any device (read back, so this synchronises). End row of each
            group.
        num_rows: rows of `a`.

    Returns:
        One (begin, end) per group, 0 <= begin <= end <= num_rows whatever the offsets hold.
    """
    ends = [min(max(end, 0), num_rows) for end in offs.tolist()]
    begins = [0, *ends[:-1]]
    return [(begin, max(begin, end)) for begin, end in zip(begins, ends, strict=True)]


def grouped_gemm_reference(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each group of rows by its own matrix in fp32, scale, and round once.

    out[i] = (a[i] @ b[g].T) * scale_a * scale_b[g] for the rows i of group g.

    Args:
        a: (num_rows, k), any floating dtype, any strides. Rows sorted by group.
        b: (num_groups, n, k), any floating dtype, any strides.
        offs: (num_groups,), int32. End row of each group.
        scale_a: float32, one element, or None for 1.
        scale_b: float32, one element or (num_groups,), or None for 1.
        out_dtype: dtype of the result where `out` is not given.
        out: (num_rows, n), written in place and returned.

    Returns:
        (num_rows, n). Rows past the last offset are not written: they keep what `out` held, or are
        uninitialised.
    """
    num_rows, num_groups, n = a.shape[0], b.shape[0], b.shape[1]
    if out is None:
        out = torch.empty((num_rows, n), dtype=out_dtype, device=a.device)
    scales = torch.ones(num_groups, dtype=torch.float32, device=a.device)
    if scale_a is not None:
        scales = scales * scale_a.reshape(1)
    if scale_b is not None:
        scales = scales * scale_b.reshape(-1)
    for group, (begin, end) in enumerate(group_rows(offs, num_rows)):
        if begin < end:
            product = a[begin:end].float() @ b[group].float().T
            out[begin:end] = product * scales[group]
    return out


def quantize_fp8_per_tensor(x: Tensor, num_leading_dims: int = 0) -> tuple[Tensor, Tensor]:
    """Quantise to FP8 E4M3 with one scale for the tensor, or one per leading index.

    Args:
        x: any shape, any floating dtype.
        num_leading_dims: dimensions that keep a scale of their own: 0 for activations, 1 for
            weights of shape (num_groups, n, k), which gives `scale_b` of shape (num_groups,).

    Returns:
        `q`, float8_e4m3fn, the shape of `x`, contiguous, and `scale`, float32,
        x.shape[:num_leading_dims]; `q * scale` approximates `x`. An all-zero or empty tensor
        has the scale 1.
    """
    reduced = tuple(range(num_leading_dims, x.dim()))
    if x.numel() == 0:
        scale = torch.ones(x.shape[:num_leading_dims], dtype=torch.float32, device=x.device)
        return x.to(torch.float8_e4m3fn).contiguous(), scale
    largest = x.abs().amax(dim=reduced, keepdim=True).float() if reduced else x.abs().float()
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    q = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q.contiguous(), scale.reshape(x.shape[:num_leading_dims])
