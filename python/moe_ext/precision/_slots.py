"""Where a bank keeps each expert's weights: slots of FP8 and of BF16, for each stage."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext.precision.layer_plan import BF16, FP8, STAGES, LayerPlan

WEIGHT = {"gate_up": "w13", "down": "w2"}
"""Names of the stages' weights, as `fused_moe` has them."""
KINDS = (FP8, BF16)
# Those of one precision in both stages first, so that they are one range of slots in each.
_PAIRS = ((FP8, FP8), (BF16, BF16), (FP8, BF16), (BF16, FP8))


class Part(NamedTuple):
    """Experts with the same precision in each stage: one range of slots in both."""

    kinds: tuple[str, str]  # of gate_up and down
    experts: tuple[int, ...]  # ascending
    begins: tuple[int, int]  # first slot among those of its kind, of gate_up and down

    @property
    def is_uniform(self) -> bool:
        """Whether both stages have the same precision."""
        return self.kinds[0] == self.kinds[1]


def parts_of(plan: LayerPlan) -> tuple[Part, ...]:
    """Return the parts of a layer that have experts, in a fixed order."""
    pairs = tuple(zip(plan.kinds("gate_up"), plan.kinds("down"), strict=True))
    parts, used = [], {(stage, kind): 0 for stage in STAGES for kind in KINDS}
    for kinds in _PAIRS:
        experts = tuple(expert for expert, own in enumerate(pairs) if own == kinds)
        places = tuple(zip(STAGES, kinds, strict=True))
        if experts:
            parts.append(Part(kinds, experts, (used[places[0]], used[places[1]])))
        for place in places:
            used[place] += len(experts)
    return tuple(parts)


def slots_of(plan: LayerPlan) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the experts in order of slots, for each (stage, kind)."""
    slots: dict[tuple[str, str], tuple[int, ...]] = {(s, k): () for s in STAGES for k in KINDS}
    for part in parts_of(plan):
        for place in zip(STAGES, part.kinds, strict=True):
            slots[place] += part.experts
    return slots


def slot_map(plan: LayerPlan, stage: str) -> Tensor:
    """Return (num_experts,) int32: slots of FP8 as they are, of BF16 as -1 - slot."""
    table = torch.empty(plan.num_experts, dtype=torch.int32)
    slots = slots_of(plan)
    fp8, bf16 = (list(slots[stage, kind]) for kind in KINDS)
    table[fp8] = torch.arange(len(fp8), dtype=torch.int32)
    table[bf16] = -1 - torch.arange(len(bf16), dtype=torch.int32)
    return table


def part_maps(plan: LayerPlan, first_expert: int) -> Tensor:
    """Return (parts, first_expert + num_experts) int32: an id's place in a part, -1 for none."""
    parts = parts_of(plan)
    maps = torch.full((len(parts), first_expert + plan.num_experts), -1, dtype=torch.int32)
    for row, part in zip(maps, parts, strict=True):
        ids = torch.tensor(part.experts) + first_expert
        row[ids] = torch.arange(len(part.experts), dtype=torch.int32)
    return maps
