"""What a cell of whole layers works on: hidden states, routing, weights from the pool, scales."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bench.draws import draw, draw_key
from bench.problem import BF16_DEVIATION, MemoryPool, Plan, carve
from bench.scales import count_segments, make_weight_scale

# One word for weights and activations: those of a layer are quantised inside it.
TENSOR_STATIC = "tensor_static"
LAYER_SCALES = ("tensor", TENSOR_STATIC, "channel", "block128")
# Token 0 of every draw is this many times as large as the others, so that a scale which is not
# the token's own shows.
OUTLIER = 8.0
FP8_MAX = 448.0
# Static scale of the intermediate: holds all of a usual token's and nearly all of token 0's.
A2_SCALE = 4.0


class LayerScales(NamedTuple):
    """Scale arguments of `moe_ext.fused_moe`, by their names there."""

    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    a1_scale: Tensor | None = None
    a2_scale: Tensor | None = None


@dataclass(frozen=True)
class LayerProblem:
    """Tensors of one cell. Call i uses copy i % copies of the weights and draw i % draws of the
    rest."""

    plan: Plan
    hidden_states: list[Tensor]  # draws of (num_tokens, hidden_size), bfloat16
    topk_weights: list[Tensor]  # draws of (num_tokens, top_k), float32
    topk_ids: list[Tensor]  # draws of (num_tokens, top_k), int32
    w13: list[Tensor]  # copies of (num_experts, 2 * intermediate_size, hidden_size)
    w2: list[Tensor]  # copies of (num_experts, hidden_size, intermediate_size)
    out: Tensor  # (num_tokens, hidden_size), bfloat16

    def operands(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return what call `index` takes, in the order of `moe_ext.fused_moe`."""
        now, copy = index % len(self.topk_ids), index % self.plan.copies
        return (
            self.hidden_states[now],
            self.w13[copy],
            self.w2[copy],
            self.topk_weights[now],
            self.topk_ids[now],
        )

    def poison(self) -> None:
        """Fill the output with NaN, so that an unwritten row shows."""
        self.out.fill_(math.nan)


def make_layer(plan: Plan, pool: MemoryPool) -> LayerProblem:
    """Carve the weights of a cell from the pool and draw the rest.

    Hidden states are normal with a deviation that makes those of gate and up about 1.

    Args:
        plan: The cell and its repetitions.
        pool: At least `plan.pool_bytes` of the cell's dtype.
    """
    cell, device = plan.cell, pool.values.device
    w13, w2 = carve(plan, pool)
    num_draws = min(plan.calls, len(plan.counts))
    key = draw_key(cell.case, cell.num_tokens, cell.routing)
    ids, weights = zip(*(draw(key, seed) for seed in range(num_draws)), strict=True)
    # FP8 weights have a deviation of about 1 with their scales.
    deviation = 1 / math.sqrt(cell.case.hidden_size)
    if cell.dtype == "bf16":
        deviation /= BF16_DEVIATION
    generator = torch.Generator(device=device).manual_seed(1)
    shape = (cell.num_tokens, cell.case.hidden_size)
    hidden_states = []
    for _ in range(num_draws):
        values = torch.randn(shape, generator=generator, device=device) * deviation
        values[0] *= OUTLIER
        hidden_states.append(values.bfloat16())
    return LayerProblem(
        plan,
        hidden_states,
        [own.to(device) for own in weights],
        [own.to(device) for own in ids],
        w13,
        w2,
        torch.empty(shape, dtype=torch.bfloat16, device=device),
    )


def make_layer_scales(problem: LayerProblem, kind: str) -> LayerScales:
    """Return the scales of a layer: "none" (BF16) or one of `LAYER_SCALES`.

    "tensor" has a scale for each expert's weights and one for each row, computed in the call;
    "tensor_static" has given ones for all activations. "channel" has one for each channel and row,
    "block128" one for each 128 x 128 and each 128 of a row.
    """
    if kind == "none":
        return LayerScales()
    of_weights = "tensor" if kind == TENSOR_STATIC else kind
    by_stage = []
    for stage, weights in zip(problem.plan.cell.stages, (problem.w13, problem.w2), strict=True):
        segments = count_segments(stage, weights[0].shape[1], of_weights)
        scale = make_weight_scale(of_weights, weights[0], segments)
        # A layer takes one grid of blocks without the dimension of segments.
        by_stage.append(scale.flatten(1, 2) if scale.dim() == 4 and segments == 1 else scale)
    scales = LayerScales(by_stage[0], by_stage[1])
    if kind != TENSOR_STATIC:
        return scales
    largest = torch.stack([own.abs().max() for own in problem.hidden_states]).max().float()
    return scales._replace(a1_scale=largest / FP8_MAX, a2_scale=torch.full_like(largest, A2_SCALE))
