"""`moe-ext plan`: a plan under a budget."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from moe_ext.cli._arguments import file_to_write
from moe_ext.cli._budget import byte_budget, relative_error
from moe_ext.cli._console import check_output, console, decibels, size
from moe_ext.precision import PrecisionStats, plan_precision
from moe_ext.precision.planning import PlannedPrecision, fp8_bytes_of


def plan(
    stats: Annotated[Path, typer.Argument(help="File of statistics that calibrate wrote.")],
    out: Annotated[
        Path, typer.Option(parser=file_to_write, metavar="PATH", help="Plan to write, JSON.")
    ],
    budget: Annotated[
        str | None, typer.Option(help="Bytes beyond uniform FP8: 2% of it, or 512MiB.")
    ] = None,
    error_budget: Annotated[
        str | None, typer.Option(help="Predicted error, with as few bytes as may be: 30dB or 3%.")
    ] = None,
) -> None:
    """Choose the experts and stages to keep in BF16."""
    if (budget is None) == (error_budget is None):
        got = "neither" if budget is None else "both"
        raise typer.BadParameter(f"one of --budget and --error-budget must be given, got {got}")
    share_of = None if budget is None else byte_budget(budget)
    error = None if error_budget is None else relative_error(error_budget)
    check_output(out, stats)
    loaded = PrecisionStats.load(stats)
    share = None if share_of is None else share_of(fp8_bytes_of(loaded))
    planned = plan_precision(loaded, byte_budget=share, error_budget=error)
    planned.plan.save(out)
    console().print(*_lines(planned, loaded, budget is not None), sep="\n")


def _lines(planned: PlannedPrecision, stats: PrecisionStats, by_bytes: bool) -> list[str]:
    total = 2 * sum(layer.num_experts for layer in stats.layers.values())
    share = planned.extra_bytes / planned.fp8_bytes
    guessed = sum(choice.from_weights for choice in planned.choices)
    lines = [
        f"{len(planned.choices)} of {total} stages of experts in BF16, {guessed} of them judged "
        "from weights alone",
        f"bytes: {size(planned.fp8_bytes)} in FP8, {size(planned.extra_bytes)} more ({share:.2%})",
        f"predicted error: {planned.fp8_error:.3%} in FP8 ({_db(planned.fp8_error)} dB), "
        f"{planned.error:.3%} planned ({_db(planned.error)} dB)",
    ]
    if by_bytes:
        lines.append(
            f"no choice within the budget is below {planned.bound:.3%}: the plan is at most "
            f"{planned.gap:.2%} of FP8's error energy above the best one"
        )
    else:
        lines.append(
            f"no choice within the error takes less than {size(math.ceil(planned.bound))} more: "
            f"the plan is at most {planned.gap:.2%} of FP8's bytes above the best one"
        )
    return lines


def _db(error: float) -> str:
    return decibels(error**-2) if error else "-"
