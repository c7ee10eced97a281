"""Every documented argument error of `fused_moe_masked`, found on the host before any launch."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext._activations import CONCATENATED, resolved
from moe_ext._expected_rows import check_expected_rows
from moe_ext._fused_moe_checks import (
    Layer,
    _check_activation,
    _check_biases,
    _check_operands,
    _check_out,
    _check_rows,
)
from moe_ext._fused_moe_scales import check_accumulate, check_scales
from moe_ext._math import ceil_div
from moe_ext._scales import SCALE_BLOCK
from moe_ext._words import device_message, name_of

MAX_BLOCKS = 2**31 - 1 - 2**16
"""Largest number of blocks of 128 values; the device counts them in 32 bits."""


def check_fused_moe_masked(
    op: str,
    out: Tensor | None,
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    counts: Tensor,
    *,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "swiglu",
    alpha: float | None = None,
    limit: float | None = None,
    gate_up_layout: str = CONCATENATED,
    accumulate: str = "promoted",
    batch_invariant: bool = False,  # nothing about it can be wrong
    expected_rows: int | None = None,
    has_memory: bool = True,
) -> Layer:
    """Raise a ValueError for the first argument that breaks the contract.

    `has_memory` is False for meta and fake tensors, whose addresses cannot be checked.

    Returns:
        The layer that the call runs, each row of a buffer a token that has chosen one expert.
    """
    gated = _check_activation(op, activation, alpha, limit, gate_up_layout)
    hidden_size, intermediate_size, num_experts = _check_operands(
        op, hidden_states, w13, w2, gated, ("num_experts", "max_rows")
    )
    if hidden_states.shape[0] != num_experts:
        raise ValueError(
            f"{op}: `hidden_states` must have {num_experts} experts to match `w13`, got shape "
            f"{tuple(hidden_states.shape)}"
        )
    num_rows = num_experts * hidden_states.shape[1]
    _check_num_rows(op, num_rows, hidden_size, intermediate_size)
    _check_counts(op, counts, num_experts, hidden_states)
    for argument, tensor in (("hidden_states", hidden_states), ("w13", w13), ("w2", w2)):
        _check_rows(op, argument, tensor, has_memory)
    _check_gaps(op, "hidden_states", hidden_states)
    layouts = check_scales(
        op, w13, w2, w13_scale, w2_scale, a1_scale, a2_scale, gated, gate_up_layout
    )
    _check_biases(op, w13_bias, w2_bias, w13, w2, gated, hidden_states)
    check_accumulate(op, accumulate, layouts)
    check_expected_rows(op, expected_rows)
    if out is not None:
        _check_out(op, out, hidden_states, has_memory)
        _check_gaps(op, "out", out)
    return Layer(
        num_rows,
        1,
        hidden_size,
        intermediate_size,
        num_experts,
        w13.dtype is torch.float8_e4m3fn,
        activation,
        gated,
        *resolved(activation, alpha, limit),
        gate_up_layout,
        *layouts,
    )


def _check_num_rows(op: str, num_rows: int, hidden_size: int, intermediate_size: int) -> None:
    blocks = ceil_div(max(hidden_size, intermediate_size), SCALE_BLOCK)
    if num_rows * blocks > MAX_BLOCKS:
        raise ValueError(
            f"{op}: `hidden_states` must have at most {MAX_BLOCKS // blocks} rows in all for these "
            f"sizes, got {num_rows}"
        )


def _check_counts(op: str, counts: Tensor, num_experts: int, hidden_states: Tensor) -> None:
    if counts.dtype is not torch.int32:
        raise ValueError(f"{op}: `counts` must be int32, got {name_of(counts.dtype)}")
    if counts.device != hidden_states.device:
        raise ValueError(device_message(op, "counts", counts, "hidden_states", hidden_states))
    if counts.shape != (num_experts,):
        raise ValueError(
            f"{op}: `counts` must have shape (num_experts,) = ({num_experts},) to match `w13`, got "
            f"{tuple(counts.shape)}"
        )
    if num_experts > 1 and counts.stride() != (1,):
        raise ValueError(f"{op}: `counts` must be contiguous, got stride {counts.stride()[0]}")


def _check_gaps(op: str, argument: str, tensor: Tensor) -> None:
    """Raise a ValueError unless the rows of all experts are as far apart as those of one."""
    num_experts, rows, _ = tensor.shape
    by_expert, by_row, _ = tensor.stride()
    if num_experts > 1 and rows > 1 and by_expert != rows * by_row:
        raise ValueError(
            f"{op}: `{argument}` must have experts that follow each other without a gap, {rows} x "
            f"{by_row} elements apart, got strides {tensor.stride()}"
        )
