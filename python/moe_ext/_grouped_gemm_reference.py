"""What the grouped GEMMs must compute, in plain fp32 PyTorch.

Needs PyTorch's default `torch.set_float32_matmul_precision("highest")` to be exact to fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ext._reference_mode import without_autocast
from moe_ext._scales import SCALE_BLOCK, has_blocks


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


@without_autocast
def grouped_gemm_reference(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    n_segments: int = 1,
    scale_b_offset: Sequence[int] = (0, 0),
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each group of rows by its own matrix in fp32, scale, and round once.

    out[i] = dequantised a[i] @ dequantised b[g].T + bias[g] for the rows i of group g.

    Args:
        a: (num_rows, k), any floating dtype, any strides. Rows sorted by group. Or, masked,
            (num_groups, max_rows, k).
        b: (num_groups, n, k), any floating dtype, any strides.
        offs: (num_groups,), int32. End row of each group; masked, its number of rows.
        scale_a: float32 in a layout of `grouped_gemm` or `grouped_gemm_masked`, or None for 1.
        scale_b: float32 in a layout of `grouped_gemm`, or None for 1.
        bias: (num_groups, n), any floating dtype, or None for 0.
        n_segments: as in `grouped_gemm`.
        scale_b_offset: as in `grouped_gemm`.
        out_dtype: dtype of the result where `out` is not given.
        out: (num_rows, n) or (num_groups, max_rows, n), written in place and returned.

    Returns:
        (num_rows, n) or (num_groups, max_rows, n). Rows that belong to no group are not written:
        they keep what `out` held, or are uninitialised.
    """
    masked, n = a.dim() == 3, b.shape[1]
    if out is None:
        out = torch.empty((*a.shape[:-1], n), dtype=out_dtype, device=a.device)
    n_offset, k_offset = scale_b_offset
    blocks = has_blocks(scale_a, scale_b, n, n_segments, n_offset, k_offset, a.dim() - 1)
    if masked:
        counts = [min(max(count, 0), a.shape[1]) for count in offs.tolist()]
        places: list[Any] = [(group, slice(0, count)) for group, count in enumerate(counts)]
    else:
        places = [slice(begin, end) for begin, end in group_rows(offs, a.shape[0])]
    for group, place in enumerate(places):
        rows, weights = a[place].float(), b[group].float()
        if rows.shape[0] == 0:
            continue
        of_rows = _scale_of_rows(scale_a, place, a.dim() - 1, a.device)
        of_weights = _scale_of_weights(scale_b, group, a.device)
        if blocks:
            rows = rows * _along_k(of_rows, rows)
            of_weights = _along_n(of_weights, n, n_segments, n_offset)
            weights = weights * _along_k(of_weights, weights, k_offset)
            product = rows @ weights.T
        else:
            product = rows @ weights.T * (of_rows * of_weights.T)
        if bias is not None:
            product = product + bias[group].float()
        out[place] = product.to(out.dtype)
    return out


def _scale_of_rows(scale: Tensor | None, place: Any, row_dims: int, device: torch.device) -> Tensor:
    """Return the scales of some rows of `a`: (1 or rows, 1 or blocks of k)."""
    if scale is None:
        return torch.ones(1, 1, dtype=torch.float32, device=device)
    if scale.dim() == 0 or scale.shape == (1,):
        return scale.reshape(1, 1)
    if scale.dim() < row_dims:  # masked, one for each group
        return scale[place[0]].reshape(1, 1)
    own = scale[place]
    return own[:, None] if scale.dim() == row_dims else own


def _scale_of_weights(scale: Tensor | None, group: int, device: torch.device) -> Tensor:
    """Return the scales of a matrix: (1, channels or blocks of n; 1 or blocks of k)."""
    if scale is None:
        return torch.ones(1, 1, dtype=torch.float32, device=device)
    if scale.dim() == 0 or scale.shape == (1,):
        return scale.reshape(1, 1)
    own = scale[group]
    if own.dim() == 0:
        return own.reshape(1, 1)
    return own[:, None] if own.dim() == 1 else own.flatten(0, -2)


def _along_k(scale: Tensor, like: Tensor, k_offset: int = 0) -> Tensor:
    """Repeat one scale per 128 of k for each of them; one for all of k stays."""
    if scale.shape[1] == 1:
        return scale.to(like.device)
    k_block = (torch.arange(like.shape[1], device=scale.device) + k_offset) // SCALE_BLOCK
    return scale[:, k_block]


def _along_n(scale: Tensor, n: int, n_segments: int, n_offset: int) -> Tensor:
    """Repeat one row of block scales for each row of its block; one for all stays."""
    if scale.shape[0] == 1:
        return scale
    segment, row = n // n_segments, torch.arange(n, device=scale.device)
    block = (row % segment + n_offset) // SCALE_BLOCK
    return scale[row // segment * (scale.shape[0] // n_segments) + block]
