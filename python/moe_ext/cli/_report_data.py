"""What statistics and a plan say of each layer: errors, bytes, and the time to read the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ext._dispatch import LAUNCH_US, READ_BYTES_PER_US
from moe_ext.nn._pieces import quoted
from moe_ext.precision import LayerStats, PrecisionPlan, PrecisionStats
from moe_ext.precision.layer_plan import STAGES, LayerPlan
from moe_ext.precision.planning import stage_bytes

_OP = "report"


@dataclass(frozen=True, eq=False)
class LayerReport:
    """One layer, in FP8 and under a plan; without a plan the two are the same.

    Attributes:
        name: of the layer.
        stats: of the layer.
        in_bf16: (num_experts, 2) bool, what the plan has in BF16.
        before: (num_experts, 2) float64, energy that FP8 in a stage adds to the output, over the
            output's.
        after: the same under the plan, 0 where it has BF16.
        fp8_bytes: of all experts in FP8.
        plan_bytes: of all experts under the plan.
        fp8_us: to read the weights that some tokens hit, at the card's bandwidth, and to launch;
            None where no token was seen.
        plan_us: the same under the plan.
    """

    name: str
    stats: LayerStats
    in_bf16: Tensor
    before: Tensor
    after: Tensor
    fp8_bytes: int
    plan_bytes: int
    fp8_us: float | None
    plan_us: float | None


def layer_reports(
    stats: PrecisionStats, plan: PrecisionPlan | None, num_tokens: int
) -> list[LayerReport]:
    """Return what is known of each layer.

    Args:
        stats: of the layers.
        plan: of the same layers, None for uniform FP8.
        num_tokens: of a call, for times.

    Raises:
        ValueError: plan and statistics are of different layers, experts or layouts of scales.
    """
    if plan is not None:
        for name in (*stats.layers, *plan.names):
            if name not in stats.layers or name not in plan.layers:
                lacks = "the plan has" if name in stats.layers else "the statistics have"
                raise ValueError(
                    f"{_OP}: plan and statistics must be of the same layers, got {quoted(name)}, "
                    f"which {lacks} not"
                )
    return [
        _report(name, own, None if plan is None else plan.layers[name], num_tokens)
        for name, own in stats.layers.items()
    ]


def _report(name: str, stats: LayerStats, plan: LayerPlan | None, num_tokens: int) -> LayerReport:
    in_bf16 = torch.zeros(stats.num_experts, 2, dtype=torch.bool)
    if plan is not None:
        _check(name, stats, plan)
        for index, stage in enumerate(STAGES):
            in_bf16[list(plan.stage(stage).bf16), index] = True
    sizes = torch.tensor(
        [[stage_bytes(stats, stage, kind) for stage in STAGES] for kind in (False, True)]
    )
    fp8 = sizes[0].expand(stats.num_experts, 2)
    planned = torch.where(in_bf16, sizes[1], sizes[0])
    signal = stats.signal
    before = stats.error / signal if signal else torch.zeros_like(stats.error)
    return LayerReport(
        name=name,
        stats=stats,
        in_bf16=in_bf16,
        before=before,
        after=before.masked_fill(in_bf16, 0.0),
        fp8_bytes=int(fp8.sum()),
        plan_bytes=int(planned.sum()),
        fp8_us=_read_us(stats, fp8, num_tokens),
        plan_us=_read_us(stats, planned, num_tokens),
    )


def _check(name: str, stats: LayerStats, plan: LayerPlan) -> None:
    if plan.num_experts != stats.num_experts:
        raise ValueError(
            f"{_OP}: the plan must have {stats.num_experts} experts in {quoted(name)}, as the "
            f"statistics, got {plan.num_experts}"
        )
    layouts = (stats.gate_up_scales, stats.down_scales)
    for stage, layout in zip(STAGES, layouts, strict=True):
        own = plan.stage(stage)
        if own.scales != layout and len(own.bf16) < plan.num_experts:
            raise ValueError(
                f"{_OP}: the plan must have scales per {layout} in {stage} of {quoted(name)}, as "
                f"the statistics, got {own.scales}"
            )


def _read_us(stats: LayerStats, sizes: Tensor, num_tokens: int) -> float | None:
    """Return how long it takes to read what some tokens hit, each choosing as those seen did."""
    if not stats.num_tokens:
        return None
    chance = (stats.rows.double() / stats.num_tokens).clamp_max(1)
    hit = 1 - (1 - chance) ** num_tokens
    return float((hit[:, None] * sizes).sum()) / READ_BYTES_PER_US + LAUNCH_US
