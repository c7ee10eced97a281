"""A whole layer of PyTorch's own operators, the plain way: sort, index, two grouped_mm, index_add.

BF16 only: in FP8 PyTorch has no operator that quantises rows, only parts to build one of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.layer import LayerProblem
from bench.providers.base import Provider, Variant
from bench.timing import Call


class TorchLayer(Provider[LayerProblem]):
    """Sums of a token's experts are in fp32 and in no fixed order."""

    name = "torch"
    needs = "torch.nn.functional.grouped_mm (PyTorch 2.10)"

    def available(self) -> bool:
        """grouped_mm is public since PyTorch 2.10."""
        return hasattr(F, "grouped_mm")

    def variants(
        self,
        dtype: str,
        accumulates: Sequence[str],
        scales: Sequence[str],
        configs: Sequence[str],
    ) -> list[Variant]:
        """BF16, and nothing when a kernel of another provider is forced."""
        return [Variant("bf16", "none", "fp32")] if dtype == "bf16" and not configs else []

    def prepare(self, problem: LayerProblem, variant: Variant) -> Call:
        """Allocates as PyTorch does: in a graph, from the graph's own memory."""
        num_experts = problem.plan.cell.case.num_experts
        experts = torch.arange(num_experts, dtype=torch.int32, device=problem.out.device)

        def call(index: int) -> list[Tensor]:
            return [_layer(*problem.operands(index), experts)]

        return call


def _layer(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    experts: Tensor,
) -> Tensor:
    ordered, order = topk_ids.flatten().sort(stable=True)
    offs = torch.searchsorted(ordered, experts, right=True, out_int32=True)
    tokens = order // topk_ids.shape[1]
    gate_up = F.grouped_mm(hidden_states[tokens], w13.transpose(-2, -1), offs=offs)
    gate, up = gate_up.chunk(2, dim=-1)
    rows = F.grouped_mm(F.silu(gate) * up, w2.transpose(-2, -1), offs=offs)
    weighted = rows * topk_weights.flatten()[order, None]
    out = torch.zeros(hidden_states.shape, device=rows.device)
    return out.index_add_(0, tokens, weighted).to(hidden_states.dtype)
