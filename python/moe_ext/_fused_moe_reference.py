"""What `fused_moe` must compute, step by step in plain float32 PyTorch, rounded where kernels do.

Needs PyTorch's default `torch.set_float32_matmul_precision("highest")` to be exact to fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext._activations import activate
from moe_ext._fused_moe_scales import weight_scale_of
from moe_ext._grouped_gemm_reference import grouped_gemm_reference
from moe_ext._quantize_reference import quantize_fp8_reference
from moe_ext._reference_mode import without_autocast


class SortedSlots(NamedTuple):
    """Slots (token * top_k + j) in expert order; those of experts elsewhere are left out."""

    offs: Tensor  # (num_experts,) int32, end row of each expert
    row_slot: Tensor  # (offs[-1],) int64
    slot_row: Tensor  # (num_tokens, top_k) int64, -1 for slots that are left out


def sort_slots(
    topk_ids: Tensor, num_experts: int, first_expert: int = 0, expert_map: Tensor | None = None
) -> SortedSlots:
    """Sort slots by expert, stably.

    Args:
        topk_ids: (num_tokens, top_k), int32 or int64, any values.
        num_experts: that are here.
        first_expert: the id of expert 0.
        expert_map: (num_global_experts,), int32: the expert of each id, others for none; or None.
    """
    ids = topk_ids.reshape(-1).long()
    if expert_map is None:
        here = (ids >= first_expert) & (ids < first_expert + num_experts)
        expert = ids.where(here, first_expert) - first_expert
    else:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        expert = expert_map.long()[ids.where(known, 0)]
        here = known & (expert >= 0) & (expert < num_experts)
    ordered, order = expert.where(here, num_experts).sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(num_experts, device=ids.device), right=True)
    row_slot = order[: int(ends[-1])]
    slot_row = torch.full_like(ids, -1)
    slot_row[row_slot] = torch.arange(row_slot.shape[0], device=ids.device)
    return SortedSlots(ends.to(torch.int32), row_slot, slot_row.reshape(topk_ids.shape))


@without_autocast
def combine_rows(
    rows: Tensor,
    slot_row: Tensor,
    topk_weights: Tensor | None,
    *,
    addend: Tensor | None = None,
    routed_scale: float = 1.0,
) -> Tensor:
    """Sum each token's rows, each times its weight, in float32 and in the order of its slots.

    Args:
        rows: (num_rows, hidden), any floating dtype.
        slot_row: (num_tokens, top_k), int64: the row of each slot, -1 for none.
        topk_weights: (num_tokens, top_k), or None for 1.
        addend: (num_tokens, hidden), added to the scaled sum; or None.
        routed_scale: factor of the sum.

    Returns:
        (num_tokens, hidden), float32.
    """
    num_tokens, top_k = slot_row.shape
    total = torch.zeros(num_tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    for j in range(top_k if rows.shape[0] else 0):
        here = slot_row[:, j] >= 0
        product = rows[slot_row[:, j].clamp_min(0)].float()
        if topk_weights is not None:
            product = product * topk_weights[:, j, None].float()
        total = torch.where(here[:, None], total + product, total)
    total = total * routed_scale
    return total if addend is None else total + addend.float()


@without_autocast
def fused_moe_reference(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
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
    gate_up_layout: str = "concatenated",
    apply_router_weight_on_input: bool = False,
    first_expert: int = 0,
    expert_map: Tensor | None = None,
    addend: Tensor | None = None,
    routed_scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    gate_up_gemm: Callable[..., Tensor] = grouped_gemm_reference,
) -> Tensor:
    """Run the expert layer as `moe_ext.fused_moe` does, on the device of its arguments.

    Rounded are: hidden rows times their weights to BF16 (only with `apply_router_weight_on_input`),
    hidden rows to FP8, the activation's result to BF16 and then FP8, the down product with its
    bias to BF16, the result. Between these, all is float32.

    Args:
        hidden_states: as in `fused_moe`, like all arguments but the last two.
        w13: see `fused_moe`.
        w2: see `fused_moe`.
        topk_weights: see `fused_moe`.
        topk_ids: see `fused_moe`; read back, so this synchronises.
        w13_scale: see `fused_moe`.
        w2_scale: see `fused_moe`.
        a1_scale: see `fused_moe`.
        a2_scale: see `fused_moe`.
        w13_bias: see `fused_moe`.
        w2_bias: see `fused_moe`.
        activation: see `fused_moe`.
        alpha: see `fused_moe`.
        limit: see `fused_moe`.
        gate_up_layout: see `fused_moe`.
        apply_router_weight_on_input: see `fused_moe`.
        first_expert: see `fused_moe`.
        expert_map: see `fused_moe`.
        addend: see `fused_moe`.
        routed_scale: see `fused_moe`.
        out_dtype: dtype of the result; None is that of `hidden_states`.
        gate_up_gemm: the first GEMM, called as `grouped_gemm_reference`. Where the intermediate
            becomes FP8, sums that differ in their last bits may fall on either side of a tie, and
            the largest of them decides a scale; a GEMM with the sums of the layer that is held to
            this reference keeps that from hiding an error, or from looking like one.

    Returns:
        (num_tokens, hidden), `out_dtype`.
    """
    rows, slots = expert_rows(
        hidden_states,
        w13,
        w2,
        topk_weights if apply_router_weight_on_input else None,
        topk_ids,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        activation=activation,
        alpha=alpha,
        limit=limit,
        gate_up_layout=gate_up_layout,
        first_expert=first_expert,
        expert_map=expert_map,
        gate_up_gemm=gate_up_gemm,
    )
    weights = None if apply_router_weight_on_input else topk_weights
    combined = combine_rows(rows, slots.slot_row, weights, addend=addend, routed_scale=routed_scale)
    return combined.to(hidden_states.dtype if out_dtype is None else out_dtype)


@without_autocast
def expert_rows(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    input_weights: Tensor | None,
    topk_ids: Tensor,
    *,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    a1_scale: Tensor | None,
    a2_scale: Tensor | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    activation: str,
    alpha: float | None,
    limit: float | None,
    gate_up_layout: str,
    first_expert: int,
    expert_map: Tensor | None,
    gate_up_gemm: Callable[..., Tensor] = grouped_gemm_reference,
) -> tuple[Tensor, SortedSlots]:
    """Run the experts of `fused_moe_reference` up to their results, one row for each slot here.

    `w13` and `w2` may be of different dtypes; the experts of a bank of mixed precision are.
    `input_weights` multiply hidden rows; None is 1.

    Returns:
        (num_rows, hidden) bfloat16, and where the rows belong.
    """
    slots = sort_slots(topk_ids, w13.shape[0], first_expert, expert_map)
    rows = hidden_states[slots.row_slot // topk_ids.shape[1]]
    if input_weights is not None:
        of_rows = input_weights.reshape(-1)[slots.row_slot].float()
        rows = (rows.float() * of_rows[:, None]).to(hidden_states.dtype)
    gate_up = _linear(
        rows, w13, slots.offs, w13_scale, a1_scale, w13_bias, torch.float32, gate_up_gemm
    )
    middle = activate(
        gate_up, activation, alpha=alpha, limit=limit, gate_up_layout=gate_up_layout
    ).bfloat16()
    return _linear(middle, w2, slots.offs, w2_scale, a2_scale, w2_bias, torch.bfloat16), slots


def _linear(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    weight_scale: Tensor | None,
    static_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    gemm: Callable[..., Tensor] = grouped_gemm_reference,
) -> Tensor:
    """Multiply rows by their experts' matrices, quantised first where the weight is."""
    scale, n_segments = None, 1
    if weight.dtype is torch.float8_e4m3fn:
        shape = () if weight_scale is None else tuple(weight_scale.shape)
        layout = weight_scale_of(shape, *weight.shape)
        if layout is None:
            raise ValueError(
                "fused_moe_reference: the scale of a weight must have a layout of `fused_moe`, got "
                f"shape {shape} for a weight {tuple(weight.shape)}"
            )
        n_segments = layout.n_segments
        computes_rows = layout.granularity == "tensor" and static_scale is None
        granularity = "row" if computes_rows else layout.granularity
        x, scale = quantize_fp8_reference(x, granularity, scale=static_scale)
    return gemm(
        x, weight, offs, scale, weight_scale, bias=bias, n_segments=n_segments, out_dtype=out_dtype
    )
