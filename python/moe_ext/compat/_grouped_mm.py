"""`grouped_mm`: the signature of `torch.nn.functional.grouped_mm` on moe_ext's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext.grouped_gemm import grouped_gemm


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply each group of rows by its own matrix, called as torch's `grouped_mm`.

    out[i] = mat_a[i] @ mat_b[g] + bias[g] for the rows offs[g - 1] <= i < offs[g] of group g.

    Args:
        mat_a: (num_rows, k), bfloat16, K contiguous, rows 16-byte aligned; rows sorted by group.
        mat_b: (num_groups, k, n), same dtype and device, column-major: a view such as
            `weight.transpose(-2, -1)` of (num_groups, n, k) weights, whose K is contiguous.
        offs: (num_groups,), int32, contiguous, same device: the end row of each group.
        bias: (num_groups, n), bfloat16 or float32. torch has the argument and refuses it so far.
        out_dtype: None or bfloat16, or float32.

    Returns:
        (num_rows, n). Rows past the last offset are uninitialised memory, as torch leaves them.

    Raises:
        ValueError: dimensions other than 2 and 3 (torch also multiplies 2 by 2, 3 by 2 and 3 by 3
            ones), row-major `mat_b`, or what `moe_ext.grouped_gemm` refuses.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        Otherwise as `moe_ext.grouped_gemm`; accepts positions for all arguments, as
        `torch._grouped_mm` does.

    Example:
        >>> a, weight = torch.ones(5, 16).bfloat16(), torch.ones(2, 8, 16).bfloat16()
        >>> ends = torch.tensor([2, 5], dtype=torch.int32)
        >>> grouped_mm(a, weight.transpose(-2, -1), offs=ends)[0, 0].item()
        16.0
    """
    if mat_a.dim() != 2 or mat_b.dim() != 3:
        raise ValueError(
            "grouped_mm: `mat_a` must have 2 dimensions and `mat_b` 3, got "
            f"{mat_a.dim()} and {mat_b.dim()}"
        )
    if offs is None:
        raise ValueError("grouped_mm: `offs` must be the end row of each group, got None")
    if mat_b.shape[1] > 1 and mat_b.stride(1) != 1:
        raise ValueError(
            "grouped_mm: `mat_b` must be column-major, (num_groups, k, n) with stride 1 along k, "
            f"got strides {mat_b.stride()}; store weights as (num_groups, n, k) and pass "
            "weight.transpose(-2, -1)"
        )
    return grouped_gemm(mat_a, mat_b.transpose(-2, -1), offs, bias=bias, out_dtype=out_dtype)
