"""Where a bank keeps each expert's weights: slots of FP8 and of BF16, for each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext.precision.layer_plan import BF16, FP8, STAGES, LayerPlan

WEIGHT = {"gate_up": "w13", "down": "w2"}
"""Names of the stages' weights, as `fused_moe` has them."""
KINDS = (FP8, BF16)
# Neighbours differ in one stage, so that the experts of a stage in one precision are one range of
# places, but for down in FP8: csrc/fused_moe/mixed_parts.hpp.
PAIRS = ((FP8, FP8), (FP8, BF16), (BF16, BF16), (BF16, FP8))


class Part(NamedTuple):
    """Experts with the same precision in each stage: one range of slots in both."""

    kinds: tuple[str, str]  # of gate_up and down
    place: int  # of its first expert, among all
    num_experts: int
    begins: tuple[int, int]  # first slot among those of its kind, of gate_up and down

    @property
    def is_uniform(self) -> bool:
        """Whether both stages have the same precision."""
        return self.kinds[0] == self.kinds[1]


def parts_of_counts(counts: Sequence[int]) -> tuple[Part, ...]:
    """Return the parts that have experts, in the order of places, from how many each pair has."""
    parts, used = [], {(stage, kind): 0 for stage in STAGES for kind in KINDS}
    place = 0
    for kinds, count in zip(PAIRS, counts, strict=True):
        gate_up, down = zip(STAGES, kinds, strict=True)
        if count:
            parts.append(Part(kinds, place, count, (used[gate_up], used[down])))
        place += count
        used[gate_up] += count
        used[down] += count
    return tuple(parts)


def _experts_by_pair(plan: LayerPlan) -> tuple[tuple[int, ...], ...]:
    """Return the experts of each pair of precisions, ascending."""
    own = tuple(zip(plan.kinds("gate_up"), plan.kinds("down"), strict=True))
    return tuple(tuple(e for e, kinds in enumerate(own) if kinds == pair) for pair in PAIRS)


def parts_of(plan: LayerPlan) -> tuple[Part, ...]:
    """Return the parts of a layer that have experts, in the order of places."""
    return parts_of_counts([len(experts) for experts in _experts_by_pair(plan)])


def slots_of(plan: LayerPlan) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the experts in order of slots, for each (stage, kind)."""
    slots: dict[tuple[str, str], tuple[int, ...]] = {(s, k): () for s in STAGES for k in KINDS}
    for kinds, experts in zip(PAIRS, _experts_by_pair(plan), strict=True):
        for place in zip(STAGES, kinds, strict=True):
            slots[place] += experts
    return slots


def place_map(plan: LayerPlan) -> Tensor:
    """Return (num_experts,) int32: each expert's place, in the order of pairs, then of numbers."""
    order = [expert for experts in _experts_by_pair(plan) for expert in experts]
    places = torch.empty(plan.num_experts, dtype=torch.int32)
    places[order] = torch.arange(plan.num_experts, dtype=torch.int32)
    return places


def slot_map(plan: LayerPlan, stage: str) -> Tensor:
    """Return (num_experts,) int32: slots of FP8 as they are, of BF16 as -1 - slot."""
    table = torch.empty(plan.num_experts, dtype=torch.int32)
    slots = slots_of(plan)
    fp8, bf16 = (list(slots[stage, kind]) for kind in KINDS)
    table[fp8] = torch.arange(len(fp8), dtype=torch.int32)
    table[bf16] = -1 - torch.arange(len(bf16), dtype=torch.int32)
    return table
