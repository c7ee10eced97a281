"""Scratch memory of a layer: how much, and what lies where in it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_ext._math import ceil_div
from moe_ext._scales import SCALE_BLOCK

ALIGNMENT = 256
"""Bytes that each part of the workspace begins at a multiple of."""

MAX_TOP_K = 32
MAX_EXPERTS = 4096
MAX_SLOTS = 2**22
"""Largest num_tokens * top_k."""

MAX_SLOTS_APART = 512
"""Of experts in two precisions: slots up to which the intermediate in FP8 has memory of its own."""

_ROW_BYTES = 16  # what TMA asks of rows
_LIST_BYTES = 128 * 16  # pieces of rows, of as many slots


class WorkspaceLayout(NamedTuple):
    """Where each part begins, in bytes from the workspace's first aligned byte.

    Parts that are in use at the same time do not overlap: `gathered` until the first GEMM has
    ended, `intermediate` from then until the second GEMM has ended (BF16) or the intermediate is
    quantised (FP8), `quantised` from then until the second GEMM has ended, `rows` from its
    beginning. All others for the whole call. While slots are sorted, all from `gathered` on is
    free, for sorting many of them.
    """

    offs: int  # (num_experts,) int32
    listed: int  # of few slots: the experts that have rows, and which
    row_slot: int  # (slots,) int32
    slot_row: int  # (slots,) int32
    gathered: int  # (slots, hidden) BF16, or FP8 with rows of a multiple of 16 bytes
    gathered_scale: int  # FP8 only: at most (slots, ceil(hidden / 128)) float32, contiguous
    intermediate: int  # (slots, intermediate) BF16, contiguous
    quantised: int  # FP8 only: (slots, intermediate) FP8
    quantised_row_bytes: int  # between its rows
    quantised_scale: int  # FP8 only: at most (slots, ceil(intermediate / 128)) float32
    quantised_scale_row_bytes: int  # between its rows
    # Whether `quantised` lies on `intermediate`, row by row: `gather_quantize` can do that.
    in_place: bool
    rows: int  # (slots, hidden) BF16, contiguous
    total: int  # bytes in all


def _aligned(size: int) -> int:
    return ceil_div(size, ALIGNMENT) * ALIGNMENT


def _fp8_row_bytes(columns: int) -> int:
    return ceil_div(columns, _ROW_BYTES) * _ROW_BYTES


def _scale_row_bytes(columns: int) -> int:
    return 4 * ceil_div(columns, SCALE_BLOCK)


def workspace_layout(
    num_slots: int, hidden_size: int, intermediate_size: int, num_experts: int, fp8: bool
) -> WorkspaceLayout:
    """Lay out the workspace of a call, as its C++ twin does (csrc/fused_moe/workspace_layout.hpp).

    Rows cost 2 * (intermediate + hidden) + 8 bytes: the down GEMM's rows take the place of the
    gathered ones, and the quantised intermediate that of gathered rows, or of what it is made
    from where it is too long for that.
    """
    offs = 0
    listed = offs + _aligned(4 * num_experts)
    row_slot = listed + _LIST_BYTES
    slot_row = row_slot + _aligned(4 * num_slots)
    first = slot_row + _aligned(4 * num_slots)
    hidden_bytes = _aligned(2 * hidden_size * num_slots)
    middle_bytes = _aligned(2 * intermediate_size * num_slots)
    if not fp8:
        second = first + hidden_bytes
        return WorkspaceLayout(
            offs,
            listed,
            row_slot,
            slot_row,
            gathered=first,
            gathered_scale=second,
            intermediate=second,
            quantised=second,
            quantised_row_bytes=2 * intermediate_size,
            quantised_scale=second,
            quantised_scale_row_bytes=0,
            in_place=False,
            rows=first,
            total=second + middle_bytes,
        )
    gathered_bytes = _aligned(_fp8_row_bytes(hidden_size) * num_slots)
    gathered_end = first + gathered_bytes + _aligned(_scale_row_bytes(hidden_size) * num_slots)
    row_bytes, scale_bytes = _fp8_row_bytes(intermediate_size), _scale_row_bytes(intermediate_size)
    # By the row alone, so that more tokens never need fewer bytes.
    in_place = row_bytes + scale_bytes > 2 * hidden_size + 8
    if in_place:
        second = max(gathered_end, first + hidden_bytes)
        row_stride = scale_stride = 2 * intermediate_size
        scale, rows, end = second + row_bytes, first, second + middle_bytes
    else:
        row_stride, scale_stride = row_bytes, scale_bytes
        scale = first + _aligned(row_bytes * num_slots)
        rows = scale + _aligned(scale_bytes * num_slots)
        second = max(gathered_end, rows)
        end = max(second + middle_bytes, rows + hidden_bytes)
    return WorkspaceLayout(
        offs,
        listed,
        row_slot,
        slot_row,
        gathered=first,
        gathered_scale=first + gathered_bytes,
        intermediate=second,
        quantised=second if in_place else first,
        quantised_row_bytes=row_stride,
        quantised_scale=scale,
        quantised_scale_row_bytes=scale_stride,
        in_place=in_place,
        rows=rows,
        total=end,
    )


def workspace_bytes(
    num_slots: int, hidden_size: int, intermediate_size: int, num_experts: int
) -> int:
    """Bytes that serve any dtype, wherever the workspace begins."""
    sizes = (num_slots, hidden_size, intermediate_size, num_experts)
    return ALIGNMENT + max(workspace_layout(*sizes, fp8).total for fp8 in (False, True))


def mixed_workspace_bytes(
    num_tokens: int, top_k: int, hidden_size: int, intermediate_size: int, num_experts: int
) -> int:
    """Bytes for experts in two precisions, wherever the workspace begins.

    csrc/fused_moe/mixed_workspace.hpp, its twin, says what lies in them.
    """
    slots = num_tokens * top_k
    parts = (
        4 * num_experts,
        _LIST_BYTES,
        4 * slots,
        4 * slots,
        _fp8_row_bytes(hidden_size) * num_tokens,
        _scale_row_bytes(hidden_size) * num_tokens,
        2 * hidden_size * slots,
        2 * intermediate_size * slots,
        _fp8_row_bytes(intermediate_size) * min(slots, MAX_SLOTS_APART),
        _scale_row_bytes(intermediate_size) * min(slots, MAX_SLOTS_APART),
    )
    return ALIGNMENT + sum(map(_aligned, parts))


def fused_moe_workspace_size(
    *,
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
) -> int:
    """Return how many bytes of `workspace` a call of `fused_moe` needs, whatever its dtype.

    Args:
        num_tokens: rows of `hidden_states`; the size for the largest number serves all smaller
            ones.
        top_k: columns of `topk_ids`.
        hidden_size: columns of `hidden_states`.
        intermediate_size: the last dimension of `w2`.
        num_experts: the first dimension of `w13` and `w2`: the experts that are here.

    Returns:
        Bytes, at most num_tokens * top_k * ((intermediate_size + hidden_size) * 2 + 16) + 4 MiB.

    Raises:
        ValueError: a number is not an int, is negative, or beyond what `fused_moe` takes.

    Example:
        >>> import torch
        >>> sizes = {"top_k": 8, "hidden_size": 2048, "intermediate_size": 768, "num_experts": 128}
        >>> workspace = torch.empty(
        ...     fused_moe_workspace_size(num_tokens=64, **sizes), dtype=torch.uint8
        ... )
    """
    op = "fused_moe_workspace_size"
    for name, value, least, most in (
        ("num_tokens", num_tokens, 0, MAX_SLOTS),
        ("top_k", top_k, 1, MAX_TOP_K),
        ("hidden_size", hidden_size, 0, 2**31 - 1),
        ("intermediate_size", intermediate_size, 0, 2**31 - 1),
        ("num_experts", num_experts, 1, MAX_EXPERTS),
    ):
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise ValueError(f"{op}: `{name}` must be an int, got {type(value).__name__}")
        if not least <= value <= most:
            raise ValueError(f"{op}: `{name}` must be {least} to {most}, got {value}")
    if num_tokens * top_k > MAX_SLOTS:
        raise ValueError(
            f"{op}: `num_tokens` times `top_k` must be at most {MAX_SLOTS}, got "
            f"{num_tokens * top_k}"
        )
    return workspace_bytes(num_tokens * top_k, hidden_size, intermediate_size, num_experts)
