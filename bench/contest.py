"""All kernels of one cell, timed one after another; the ones that matter twice."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from bench.measure import Environment, judge_error, measure
from bench.providers.base import P, Provider, Variant
from bench.rows import Row
from bench.timing import TimingPolicy

# A kernel whose fastest warm-up replay is this much slower than the best so far is not timed on,
GIVE_UP_FACTOR = 1.25
# nor one whose samples of a first burst are.
STOP_FACTOR = 1.1
# Kernels that take at most this share longer than the best are its rivals: where a first pass is a
# short one they are timed again, and their clocks are compared.
NEAR = 0.05
# Two timings of a kernel, or the SM clocks of rivals, differ by no more than this, or the cell says
# nothing.
STEADY = 0.03


@dataclass
class Likeness:
    """Holds outputs to a reference until one is right, then to that one, which costs less.

    Kernels of a cell add the same products in other orders.
    """

    outputs: list[Tensor] | None = None
    limit: float = 0.0

    def judge(
        self, problem: Any, variant: Variant, outputs: Sequence[Tensor]
    ) -> tuple[float, float]:
        """Return the error of outputs and the largest that is timed."""
        if self.outputs is not None:
            return _difference(self.outputs, outputs), self.limit
        error, self.limit = judge_error(problem, variant, outputs)
        if error <= self.limit:
            self.outputs = [out.clone() for out in outputs]
        return error, self.limit


def _difference(expected: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    worst = 0.0
    for right, out in zip(expected, outputs, strict=True):
        difference = float((out - right).abs().max() / right.abs().max())
        # A NaN anywhere is one here; as every comparison with it is false, it must be asked for.
        worst = math.inf if math.isnan(difference) else max(worst, difference)
    return worst


def hold_contest(
    provider: Provider[P],
    variants: Sequence[Variant],
    problem: P,
    policy: TimingPolicy,
    environment: Environment,
    now: Callable[[], float] = time.time,
    first_pass: TimingPolicy | None = None,
) -> list[Row]:
    """Time every variant once, and again the first of them that has a time, and the fastest.

    Rows of a contest share `visit`; the second timing is in `again_us`. A kernel clearly slower
    than the best before it is not timed to the end, see `bench.timing.time_cuda`. With
    `first_pass`, of fewer samples, all are timed that way first, and all within `NEAR` of the
    fastest again.
    """
    likeness, best = Likeness(), math.inf

    def run(variant: Variant, policy: TimingPolicy) -> Row:
        return measure(
            provider,
            variant,
            problem,
            policy,
            environment,
            give_up_us=GIVE_UP_FACTOR * best,
            stop_us=STOP_FACTOR * best,
            judge=likeness.judge,
        )

    rows = []
    for variant in variants:
        rows.append(run(variant, first_pass or policy))
        best = min(best, time_of(rows[-1]))
    timed = [index for index, row in enumerate(rows) if row.median_us is not None]
    twice = {timed[0], min(timed, key=lambda index: time_of(rows[index]))} if timed else set()
    if first_pass is not None:
        twice |= {index for index in timed if time_of(rows[index]) <= (1 + NEAR) * best}
    best = math.inf  # a second timing is never cut short
    for index in sorted(twice):
        again = run(variants[index], policy)
        clock = rows[index].sm_mhz if first_pass is None else again.sm_mhz
        rows[index] = replace(rows[index], again_us=again.median_us, sm_mhz=clock)
    visit = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now()))
    return [replace(row, visit=visit) for row in rows]


def time_of(row: Row) -> float:
    """Return a row's median, infinite where there is none."""
    return math.inf if row.median_us is None else row.median_us


def both_us(row: Row) -> float:
    """Return the mean of both timings of a row, or the only one."""
    return time_of(row) if row.again_us is None else (time_of(row) + row.again_us) / 2


def disagreement(rows: Iterable[Row]) -> str:
    """Return why a contest says nothing; empty where clocks and second timings agree."""
    rows = [row for row in rows if row.median_us is not None]
    if not rows:
        return "no kernel has a time"
    best = min(map(time_of, rows))
    again = [row for row in rows if row.again_us is not None]
    if not again:
        return "no kernel was timed twice"
    for row in again:
        assert row.again_us is not None
        ratio = max(row.again_us, time_of(row)) / min(row.again_us, time_of(row))
        if ratio > 1 + STEADY:
            return f"{row.config} took {row.median_us:.1f} us, then {row.again_us:.1f}"
    near = [row for row in rows if time_of(row) <= (1 + NEAR) * best and row.sm_mhz is not None]
    clocks = sorted((row.sm_mhz or 0.0, row.config) for row in near)
    if clocks and clocks[-1][0] > (1 + STEADY) * clocks[0][0]:
        (low, slow), (high, fast) = clocks[0], clocks[-1]
        return f"{slow} ran at {low:.0f} MHz, {fast} at {high:.0f}"
    return ""
