"""What `fused_moe_mixed` must compute, in plain float32 PyTorch, rounded where kernels round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_ext._fused_moe_reference import combine_rows, expert_rows
from moe_ext._reference_mode import without_autocast
from moe_ext.precision._mixed_layer import (
    layer_of,
    map_of_part,
    parts_of_layer,
    places_of_ids,
    tensors_of,
)

if TYPE_CHECKING:
    from moe_ext.precision.bank import ExpertBank


@without_autocast
def fused_moe_mixed_reference(
    hidden_states: Tensor,
    bank: ExpertBank,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    addend: Tensor | None = None,
    expert_map: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Run the experts of a bank as `fused_moe_mixed` does, on the device of its arguments.

    Every row goes through its expert as `moe_ext.reference.fused_moe_reference` has it, each stage
    in its own precision; then a token's rows are added in the order of its choices.

    Args:
        hidden_states: as in `fused_moe_mixed`, like all arguments but the last.
        bank: see there.
        topk_weights: see there.
        topk_ids: see there; read back, so this synchronises.
        addend: see there.
        expert_map: see there.
        out_dtype: dtype of the result; None is that of `hidden_states`.

    Returns:
        (num_tokens, hidden), `out_dtype`.
    """
    on_input = bank.apply_router_weight_on_input
    results: list[Tensor] = []
    slot_row = torch.full(topk_ids.shape, -1, dtype=torch.int64, device=topk_ids.device)
    layer = layer_of(bank)
    places = places_of_ids(layer, expert_map)
    for part in parts_of_layer(layer):
        rows, slots = expert_rows(
            hidden_states,
            input_weights=topk_weights if on_input else None,
            topk_ids=topk_ids,
            activation=bank.activation,
            alpha=bank.alpha,
            limit=bank.limit,
            gate_up_layout=bank.gate_up_layout,
            first_expert=0,
            expert_map=map_of_part(places, part),
            **tensors_of(layer, part),  # type: ignore[arg-type]
        )
        begin = sum(result.shape[0] for result in results)
        slot_row = torch.where(slots.slot_row < 0, slot_row, slots.slot_row + begin)
        results.append(rows)
    combined = combine_rows(
        torch.cat(results),
        slot_row,
        None if on_input else topk_weights,
        addend=addend,
        routed_scale=bank.routed_scale,
    )
    return combined.to(hidden_states.dtype if out_dtype is None else out_dtype)
