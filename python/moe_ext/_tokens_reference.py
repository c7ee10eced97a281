"""What the two ends of a layer must compute, bit for bit, in plain PyTorch: sort and combine."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext._reference_mode import without_autocast


def local_experts(
    ids: Tensor, num_experts: int, first_expert: int, expert_map: Tensor | None
) -> Tensor:
    """Return the expert here of each id, `num_experts` for ids that have none."""
    if expert_map is None:
        # Bounds first: a difference of int64 numbers may overflow.
        here = (ids >= first_expert) & (ids < first_expert + num_experts)
        return torch.where(here, ids - first_expert, num_experts)
    known = (ids >= 0) & (ids < expert_map.shape[0])
    local = torch.full_like(ids, -1)
    local[known] = expert_map.long()[ids[known]]
    return torch.where((local >= 0) & (local < num_experts), local, num_experts)


@without_autocast
def sort_tokens_reference(
    topk_ids: Tensor,
    num_experts: int,
    *,
    first_expert: int = 0,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort slots by expert as `moe_ext.sort_tokens` does, on the device of `topk_ids`.

    Args:
        topk_ids: (num_tokens, top_k), any integer dtype, any strides.
        num_experts: experts here.
        first_expert: the first id that is here, without a map.
        expert_map: (num_global,), any integer dtype, or None.

    Returns:
        `offs` (num_experts,), `row_slot` and `slot_row` (num_tokens * top_k,), int32.
    """
    ids = topk_ids.reshape(-1).long()
    experts = local_experts(ids, num_experts, first_expert, expert_map)
    of_rows, slots = torch.sort(experts, stable=True)
    offs = torch.bincount(experts, minlength=num_experts + 1)[:num_experts].cumsum(0)
    rows = torch.arange(ids.numel(), device=ids.device)
    dropped = of_rows == num_experts
    slot_row = torch.empty_like(rows)
    slot_row[slots] = rows.masked_fill(dropped, -1)
    return offs.int(), slots.masked_fill(dropped, -1).int(), slot_row.int()


@without_autocast
def combine_tokens_reference(
    y: Tensor,
    slot_row: Tensor,
    topk_weights: Tensor | None,
    *,
    top_k: int,
    addend: Tensor | None = None,
    routed_scale: float = 1.0,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Add each token's weighted rows as `moe_ext.combine_tokens` does, on the device of `y`.

    Args:
        y: (num_rows, hidden_size), any floating dtype, any strides.
        slot_row: (num_tokens * top_k,), any integer dtype.
        topk_weights: (num_tokens, top_k), any floating dtype, or None for 1.
        top_k: rows of a token.
        addend: (num_tokens, hidden_size), any floating dtype, or None.
        routed_scale: factor of the rows' sum.
        out_dtype: dtype of the result.

    Returns:
        (num_tokens, hidden_size), contiguous.
    """
    rows = slot_row.reshape(-1, top_k).long()
    here = (rows >= 0) & (rows < y.shape[0])
    total = torch.zeros(rows.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for choice in range(top_k):
        chosen = here[:, choice]
        values = y[rows[chosen, choice]].float()
        if topk_weights is not None:
            values = topk_weights[chosen, choice, None].float() * values
        total[chosen] = total[chosen] + values
    total = total * torch.tensor(routed_scale, dtype=torch.float32, device=y.device)
    if addend is not None:
        total = total + addend.float()
    return total.to(out_dtype)
