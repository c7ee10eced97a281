"""Layouts of FP8 scales: which shapes are accepted, and what they ask of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from moe_ext._math import ceil_div

SCALE_BLOCK = 128
"""Rows and columns of a weight block with a scale of its own, and columns of a token's."""


class Sizes(NamedTuple):
    """Sizes of a checked problem."""

    rows: tuple[int, ...]  # (num_rows,), or masked (num_groups, max_rows)
    num_groups: int
    n: int
    k: int


def has_blocks(
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    n: int,
    n_segments: int = 1,
    n_offset: int = 0,
    k_offset: int = 0,
    row_dims: int = 1,
) -> bool:
    """Whether scales are per block: by their shapes, or because something is said of their grid.

    Shapes that fit no layout may give either. `row_dims` is 2 where `a` is masked. The C++ op has a
    twin of this and of `block_kind`, csrc/grouped_gemm/kind.cpp, which finds remembered choices and
    refuses one of another kind.
    """
    if n_segments != 1 or n_offset != 0 or k_offset != 0:
        return True
    if scale_a is not None and scale_a.dim() == row_dims + 1 and scale_a.shape[row_dims] != 1:
        return True
    if scale_b is None or scale_b.dim() < 3:
        return False
    return scale_b.dim() == 4 or scale_b.shape[2] != 1 or scale_b.shape[1] not in (1, n)


def block_kind(n: int, n_segments: int, n_offset: int, k_offset: int = 0) -> str:
    """Return dispatch's name of the kernels that take the blocks.

    It is "block", "block_swapped" where blocks do not begin at multiples of 128 of n (only Swap-AB
    kernels take those), or "shifted" where they do not begin at multiples of 128 of k.
    """
    if k_offset:
        return "shifted"
    aligned = n_offset == 0 and (n_segments == 1 or n // 2 % SCALE_BLOCK == 0)
    return "block" if aligned else "block_swapped"


def check_scale_layouts(
    op: str,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    scale_b_offset: Sequence[int],
    n_segments: int,
    accumulate: str,
    sizes: Sizes,
) -> str:
    """Raise a ValueError for scales that fit no layout.

    Returns:
        How the kernel must sum: `accumulate`, or `block_kind` where scales change along k.
    """
    offset = tuple(scale_b_offset)
    if len(offset) != 2 or not all(
        isinstance(start, int) and 0 <= start < SCALE_BLOCK for start in offset
    ):
        raise ValueError(
            f"{op}: `scale_b_offset` must be (n0, k0), each 0 to {SCALE_BLOCK - 1}, got {offset}"
        )
    if n_segments not in (1, 2) or sizes.n % n_segments:
        raise ValueError(
            f"{op}: `n_segments` must be 1, or 2 with an even n, got {n_segments} with n {sizes.n}"
        )
    blocks = has_blocks(scale_a, scale_b, sizes.n, n_segments, *offset, len(sizes.rows))
    if (any(offset) or n_segments != 1) and (scale_b is None or scale_b.dim() < 3):
        argument, value = ("scale_b_offset", offset) if any(offset) else ("n_segments", n_segments)
        default = (0, 0) if any(offset) else 1
        raise ValueError(
            f"{op}: `{argument}` must be {default} where `scale_b` is not per block, got {value}"
        )
    if scale_a is not None:
        _check_scale_a(op, scale_a, sizes)
    if scale_b is not None:
        _check_scale_b(op, scale_b, sizes, n_segments, offset, blocks)
    if not blocks:
        return accumulate
    if accumulate != "promoted":
        raise ValueError(
            f'{op}: `accumulate` must be "promoted" with scales per block, which every sum of 128 '
            f'is multiplied by, got "{accumulate}"'
        )
    return block_kind(sizes.n, n_segments, *offset)


def _check_scale_a(op: str, scale: Tensor, sizes: Sizes) -> None:
    rows, blocks = sizes.rows, ceil_div(sizes.k, SCALE_BLOCK)
    # Masked rows are (num_groups, max_rows): the first alone is one scale for each group.
    if tuple(scale.shape) not in ((), (1,), rows[:-1], rows, (*rows, 1), (*rows, blocks)):
        name = "num_rows," if len(rows) == 1 else "num_groups, max_rows"
        by_group = "" if len(rows) == 1 else f"(num_groups,) = ({rows[0]},), "
        raise ValueError(
            f"{op}: `scale_a` must have shape (), (1,), {by_group}({name}) = {rows}, "
            f"{(*rows, 1)} or ({name.rstrip(',')}, ceil(k / 128)) = {(*rows, blocks)}, got "
            f"{tuple(scale.shape)}"
        )


def _check_scale_b(
    op: str,
    scale: Tensor,
    sizes: Sizes,
    n_segments: int,
    offset: tuple[int, ...],
    blocks: bool,
) -> None:
    shape, groups, n = tuple(scale.shape), sizes.num_groups, sizes.n
    each = ceil_div(n // n_segments + offset[0], SCALE_BLOCK)
    along_k = ceil_div(sizes.k + offset[1], SCALE_BLOCK)
    by_group = ((), (1,), (groups,), (groups, 1), (groups, 1, 1))
    by_channel = ((groups, n), (groups, n, 1))
    by_block = ((groups, n_segments * each, along_k), (groups, n_segments, each, along_k))
    if shape in by_block and blocks:
        return
    if shape in by_group and n_segments == 1 and not any(offset):
        return
    if shape in by_channel:
        if blocks:
            raise ValueError(
                f"{op}: `scale_b` must be per group or per block where `scale_a` is per block, "
                f"got one per channel, {shape}"
            )
        return
    raise ValueError(
        f"{op}: `scale_b` must have shape (), (1,), (num_groups,) = ({groups},), (num_groups, n) "
        f"= ({groups}, {n}), ({groups}, {n}, 1), or for blocks of 128 x 128 {by_block[0]} or "
        f"{by_block[1]} (with n_segments={n_segments} and scale_b_offset={offset}), got {shape}"
    )
