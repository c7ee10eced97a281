"""Inputs of `sort_tokens` and `combine_tokens`, and both once more as plain loops."""

from __future__ import annotations

import torch
from torch import Tensor

POISON = -123456789
"""An int32 that no output may keep."""

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def strange_ids(num_experts: int, dtype: torch.dtype) -> list[int]:
    """Ids that no expert of `num_experts` has, some of which would become one if cut short."""
    ids = [-1, -2, num_experts, num_experts + 1, INT32_MIN, INT32_MAX, INT32_MIN + 1]
    if dtype is torch.int64:
        ids += [INT64_MIN, INT64_MIN + 1, INT64_MAX, 2**32, 2**32 + 1, -(2**32), 2**33]
    return ids


def draw_ids(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    dtype: torch.dtype = torch.int64,
    device: str = "cpu",
    strange: float = 0.0,
) -> Tensor:
    """Ids drawn with replacement, so that some tokens choose an expert twice."""
    shape = (num_tokens, top_k)
    ids = torch.randint(0, num_experts, shape, dtype=dtype, device=device)
    if strange:
        others = torch.tensor(strange_ids(num_experts, dtype), dtype=dtype, device=device)
        chosen = torch.randint(0, len(others), shape, device=device)
        ids = torch.where(torch.rand(shape, device=device) < strange, others[chosen], ids)
    return ids


def sort_by_loop(
    ids: list[list[int]],
    num_experts: int,
    first_expert: int = 0,
    expert_map: list[int] | None = None,
) -> tuple[list[int], list[int], list[int]]:
    """Expert after expert, slot after slot."""
    slots = [id for token in ids for id in token]

    def expert_of(id: int) -> int:
        if expert_map is None:
            return id - first_expert
        return expert_map[id] if 0 <= id < len(expert_map) else -1

    offs, row_slot, slot_row = [], [], [-1] * len(slots)
    for expert in range(num_experts):
        for slot, id in enumerate(slots):
            if expert_of(id) == expert:
                slot_row[slot] = len(row_slot)
                row_slot.append(slot)
        offs.append(len(row_slot))
    return offs, row_slot + [-1] * (len(slots) - len(row_slot)), slot_row


def combine_by_loop(
    y: Tensor,
    slot_row: Tensor,
    topk_weights: Tensor | None,
    top_k: int,
    addend: Tensor | None,
    routed_scale: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """Token after token, choice after choice, every step in float32."""
    num_tokens = slot_row.shape[0] // top_k
    out = torch.zeros(num_tokens, y.shape[1], dtype=out_dtype, device=y.device)
    rows = slot_row.tolist()
    for token in range(num_tokens):
        total = torch.zeros(y.shape[1], device=y.device)
        for choice in range(top_k):
            row = rows[token * top_k + choice]
            if not 0 <= row < y.shape[0]:
                continue
            product = y[row].float()
            if topk_weights is not None:
                product = product * topk_weights[token, choice].float()
            total = total + product
        total = total * torch.tensor(routed_scale, dtype=torch.float32, device=y.device)
        if addend is not None:
            total = total + addend[token].float()
        out[token] = total.to(out_dtype)
    return out


def assert_sorted(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """`offs`, `row_slot` and `slot_row` are those expected, as int32."""
    for name, got, want in zip(("offs", "row_slot", "slot_row"), actual, expected, strict=True):
        assert got.dtype is torch.int32, name
        assert got.shape == want.shape, name
        if not torch.equal(got, want):
            wrong = (got != want).nonzero().flatten()
            first = int(wrong[0])
            raise AssertionError(
                f"{name}: {wrong.numel()} of {got.numel()} differ, the first at {first}: "
                f"{int(got[first])} in place of {int(want[first])}"
            )
