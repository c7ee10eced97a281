"""`plan_precision`: where BF16 removes most error for its bytes, under a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_ext._math import ceil_div
from moe_ext.nn._arguments import check_number, shown
from moe_ext.nn._store import scale_shape
from moe_ext.precision.layer_plan import STAGES, LayerPlan, StagePlan
from moe_ext.precision.plan import PrecisionPlan
from moe_ext.precision.stats import LayerStats, PrecisionStats

_OP = "plan_precision"
_ROW_BYTES = 16


@dataclass(frozen=True)
class Choice:
    """One stage of one expert that a plan has in BF16, and what that is worth."""

    layer: str
    expert: int
    stage: str
    extra_bytes: int  # of BF16 over FP8
    removed: float  # share of the error energy of uniform FP8
    from_weights: bool  # whether the error was judged from weights alone


@dataclass(frozen=True)
class PlannedPrecision:
    """A plan, and what it costs and removes by the statistics.

    Errors are relative: root of noise energy over signal energy. Noise is that of the model's
    output where the statistics have it, else the mean over layers of that of the layer's output.

    Attributes:
        plan: the plan.
        choices: what it has in BF16, in the order of error removed per byte. A plan of a larger
            budget begins with these.
        fp8_bytes: of all experts' weights with their scales, in FP8.
        extra_bytes: what the plan needs beyond these.
        fp8_error: of uniform FP8, predicted: the root of the sum of all errors' energies.
        error: of the plan, predicted.
        bound: of a byte budget, the least error that any choice within it could have; the plan of
            the fractional knapsack, which may take a part of an expert. Of an error budget, the
            least extra bytes, likewise.
        gap: of a byte budget, the share of uniform FP8's error energy by which the plan is above
            the bound; of an error budget, the share of `fp8_bytes`. The best plan is in between.
    """

    plan: PrecisionPlan
    choices: tuple[Choice, ...]
    fp8_bytes: int
    extra_bytes: int
    fp8_error: float
    error: float
    bound: float
    gap: float


def plan_precision(
    stats: PrecisionStats,
    *,
    byte_budget: float | None = None,
    error_budget: float | None = None,
) -> PlannedPrecision:
    """Choose what is in BF16, by error removed per byte added.

    Args:
        stats: of `moe_ext.calibrate`.
        byte_budget: at most so many bytes more than uniform FP8 has, as a share of those: 0.03 is
            3 %. All in BF16 is about 1.
        error_budget: at most this predicted error, relative: 0.01 is 1 % or 40 dB; with as few
            bytes as the order allows.

    Returns:
        The plan, with what it removes, and how far it may be from the best one.

    Raises:
        ValueError: not exactly one budget is given, or one is negative or not finite.

    Notes:
        All stages are ordered by error energy per byte, and the plan is the longest beginning of
        that order within the budget (with an error budget, the shortest that meets it). So plans
        grow with the budget, each one containing the smaller ones', and the same statistics give
        the same plan; equal ones are in the order of layers, experts, stages. Such a plan misses
        the fractional bound by less than the one stage behind its end. Stages without error stay
        in FP8.

    Example:
        >>> from moe_ext.precision import calibrate, realistic_layer
        >>> layer = realistic_layer(32, 64, 32, top_k=4, super_experts=1)
        >>> stats = calibrate(layer.experts(), [tuple(layer.tokens(512))])
        >>> planned = plan_precision(stats, byte_budget=0.04)
        >>> set(layer.planted) <= {(choice.expert, choice.stage) for choice in planned.choices}
        True
    """
    if not isinstance(stats, PrecisionStats):
        raise ValueError(f"{_OP}: `stats` must be PrecisionStats, got {shown(stats)}")
    if (byte_budget is None) == (error_budget is None):
        raise ValueError(
            f"{_OP}: one of `byte_budget` and `error_budget` must be given, got "
            f"{'neither' if byte_budget is None else 'both'}"
        )
    for name, budget in (("byte_budget", byte_budget), ("error_budget", error_budget)):
        check_number(_OP, name, budget, optional=True)
        if budget is not None and not (0 <= budget < math.inf):
            raise ValueError(f"{_OP}: `{name}` must be finite and not negative, got {budget}")
    items = _ordered(stats)
    fp8_bytes = fp8_bytes_of(stats)
    # What is left after so many choices; summed from the small end, so that it never rises.
    left = [0.0]
    for item in reversed(items):
        left.append(left[-1] + item.removed)
    left.reverse()
    total = left[0]
    if byte_budget is not None:
        count, bound, gap = _within_bytes(items, left, byte_budget * fp8_bytes)
        bound = math.sqrt(bound)
    else:
        assert error_budget is not None
        count, bound = _within_error(items, left, error_budget**2)
        gap = (sum(item.extra_bytes for item in items[:count]) - bound) / fp8_bytes
    scale = 1 / total if total else 0.0
    choices = tuple(
        Choice(i.layer, i.expert, i.stage, i.extra_bytes, i.removed * scale, i.from_weights)
        for i in items[:count]
    )
    return PlannedPrecision(
        plan=_plan_of(stats, choices),
        choices=choices,
        fp8_bytes=fp8_bytes,
        extra_bytes=sum(choice.extra_bytes for choice in choices),
        fp8_error=math.sqrt(total),
        error=math.sqrt(left[count]),
        bound=bound,
        gap=gap * scale if byte_budget is not None else gap,
    )


def _within_bytes(
    items: list[Choice], left: list[float], budget: float
) -> tuple[int, float, float]:
    """Return how many choices fit, the least energy that can be left, and how much more is."""
    spent = 0
    for count, item in enumerate(items):
        if spent + item.extra_bytes > budget:
            part = item.removed * ((budget - spent) / item.extra_bytes)
            return count, max(left[count] - part, 0.0), part
        spent += item.extra_bytes
    return len(items), left[-1], 0.0


def _within_error(items: list[Choice], left: list[float], budget: float) -> tuple[int, float]:
    """Return how many choices it takes, and the least bytes that it may take."""
    spent = 0.0
    for count, item in enumerate(items):
        if left[count] <= budget:
            return count, spent
        if left[count + 1] <= budget:
            return count + 1, spent + item.extra_bytes * ((left[count] - budget) / item.removed)
        spent += item.extra_bytes
    return len(items), spent


def _ordered(stats: PrecisionStats) -> list[Choice]:
    """Return every stage with an error, by error per byte; `removed` is relative energy."""
    items = []
    for name, layer in stats.layers.items():
        weight = _weight_of(stats, layer)
        errors, judged = layer.error.tolist(), layer.from_weights.tolist()
        extra = {stage: stage_bytes(layer, stage, True) for stage in STAGES}
        extra = {stage: size - stage_bytes(layer, stage, False) for stage, size in extra.items()}
        for expert, of_stages in enumerate(errors):
            for stage, error in zip(STAGES, of_stages, strict=True):
                if not 0 <= error < math.inf:
                    raise ValueError(
                        f'{_OP}: the error of "{name}", expert {expert}, {stage} must be finite '
                        f"and not negative, got {error}"
                    )
                if error * weight > 0:
                    items.append(
                        Choice(name, expert, stage, extra[stage], error * weight, judged[expert])
                    )
    # Python's sort is stable: equal ones stay in the order of layers, experts, stages.
    return sorted(items, key=lambda item: -(item.removed / item.extra_bytes))


def _weight_of(stats: PrecisionStats, layer: LayerStats) -> float:
    """Return what turns an energy of a layer's statistics into one relative to the output."""
    whole = float(layer.error.sum())
    known = all(own.model_noise is not None for own in stats.layers.values())
    if known and layer.model_signal and layer.model_noise is not None:
        return layer.model_noise / (layer.model_signal * whole) if whole else 0.0
    return 1 / (layer.signal * len(stats.layers)) if layer.signal else 0.0


def stage_bytes(layer: LayerStats, stage: str, in_bf16: bool) -> int:
    """Return the bytes of one expert's stage as a bank keeps it: padded rows, and scales."""
    hidden, intermediate = layer.hidden_size, layer.intermediate_size
    n, k = (hidden, intermediate)
    if stage == "gate_up":
        n, k = intermediate * (2 if layer.gated else 1), hidden
    if in_bf16:
        return n * ceil_div(2 * k, _ROW_BYTES) * _ROW_BYTES
    layout = layer.gate_up_scales if stage == "gate_up" else layer.down_scales
    scales = math.prod(scale_shape(layout, 1, n, k, stage == "gate_up" and layer.halves))
    return n * ceil_div(k, _ROW_BYTES) * _ROW_BYTES + 4 * scales


def fp8_bytes_of(stats: PrecisionStats) -> int:
    """Return the bytes of all experts' weights and scales, all of them in FP8."""
    return sum(map(_layer_fp8_bytes, stats.layers.values()))


def _layer_fp8_bytes(layer: LayerStats) -> int:
    return layer.num_experts * sum(stage_bytes(layer, stage, False) for stage in STAGES)


def _plan_of(stats: PrecisionStats, choices: tuple[Choice, ...]) -> PrecisionPlan:
    chosen: dict[tuple[str, str], list[int]] = {}
    for choice in choices:
        chosen.setdefault((choice.layer, choice.stage), []).append(choice.expert)
    return PrecisionPlan(
        {
            name: LayerPlan(
                layer.num_experts,
                *(
                    StagePlan(scales, tuple(sorted(chosen.get((name, stage), ()))))
                    for stage, scales in zip(
                        STAGES, (layer.gate_up_scales, layer.down_scales), strict=True
                    )
                ),
            )
            for name, layer in stats.layers.items()
        }
    )
