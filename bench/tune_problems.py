"""Timed cells as measured problems of the dispatcher's tables, and tables made of them."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import TYPE_CHECKING

from bench.candidates import gated_sums, stage_sums
from bench.cases import STAGES
from bench.contest import both_us
from bench.ops import GEMM, LAYER
from bench.problem import Cell
from bench.providers.base import Variant, joined, kernels_of
from bench.rows import Row
from bench.tune_cells import cell_of
from bench.tune_fit import Fit, Timed, fit

if TYPE_CHECKING:
    from moe_ext._configs import GroupedGemmConfig
    from moe_ext._dispatch_measured import Measured

TableKey = tuple[str, str, str]
"""Op ("gemm" or "layer"), dtype and dispatch's name of the way to sum."""

# A table has the kernels for both GEMMs that at least so many of the problems in a file timed, and
# of two different ones as few as every problem needs to have a choice so close to its best. More
# were no better on layers that were left out (docs/notes/choosing-kernels.md), and take the host
# longer.
LEAST_SHARE = 1 / 8
CLOSE = 0.01
# A time more than this much over the best's is rough, as the kernel was given up.
MOST_OVER = 0.5


@dataclass(frozen=True)
class Visit:
    """One contest of kernels: its rows, which have times, and the file they are in."""

    rows: Sequence[Row]
    file: str


@dataclass(frozen=True)
class Problem:
    """A timed pair of GEMMs or layer."""

    table: TableKey
    cell: Cell
    variant: Variant
    visit: Visit

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Groups, hidden and intermediate size, rows."""
        case = self.cell.case
        return (case.num_experts, case.hidden_size, case.intermediate_size, self.cell.num_rows)

    @property
    def times(self) -> dict[str, float]:
        """Microseconds of every configuration."""
        return {row.config: both_us(row) for row in self.visit.rows}

    @property
    def choices(self) -> dict[str, float]:
        """Microseconds of those that a table can choose.

        Kernels for few K are chosen by rows of their own (`WHOLE_ROWS` of `_dispatch_table`): where
        these have one, pairs are of it and the kernel of the first GEMM, which has the time.
        """
        if self.table[0] == "layer":
            return self.times
        whole = self.whole_rows
        if whole:
            ends = f"+{whole}"
            timed = {c.removesuffix(ends): us for c, us in self.times.items() if c.endswith(ends)}
            if len(timed) > 1:
                return timed
        by_id = _by_id()
        return {
            config: us
            for config, us in self.times.items()
            if all(by_id[name].order != "SwapABRows" for name in config.split("+"))
        }

    @functools.cached_property
    def whole_rows(self) -> str:
        """The kernel for few K that the second GEMM gets, if any."""
        from moe_ext._dispatch_table import WHOLE_ROWS

        case = self.cell.case
        shape = (case.num_experts, *case.stage_shape("down"))
        for row in WHOLE_ROWS.get(self.table[2], ()):
            if row.matches(self.cell.num_rows, *shape, 132):
                return row.config
        return ""


def _by_id() -> dict[str, GroupedGemmConfig]:
    from moe_ext._configs import all_configs

    return {config.id: config for config in all_configs()}


def problems_of(visits: Iterable[Visit]) -> list[Problem]:
    """Return the problems that tables are made of; a GEMM alone is none."""
    problems = []
    for visit in visits:
        cell, variant = cell_of(visit.rows[0])
        if cell.op == GEMM:
            continue
        sums = gated_sums(variant) if cell.op == LAYER else stage_sums(cell, variant)[-1]
        table = ("layer" if cell.op == LAYER else "gemm", variant.dtype, sums)
        problem = Problem(table, cell, variant, visit)
        if problem.choices:  # one alone is kept: it is known, and others are not
            problems.append(problem)
    return problems


def choices_of(problems: Sequence[Problem]) -> tuple[str, ...]:
    """Return the choices of a table, in the order of the compiled kernels."""
    kept, ids = set[str](), list(_by_id())
    for file in {problem.visit.file for problem in problems}:
        own = [problem for problem in problems if problem.visit.file == file]
        counts = Counter(c for problem in own for c in problem.choices if "+" not in c)
        kept |= {config for config, count in counts.items() if count >= LEAST_SHARE * len(own)}
    wanting = [near for problem in problems if not kept & (near := _near_best(problem))]
    while wanting:
        counts = Counter(config for near in wanting for config in near)
        most = max(counts.values())
        kept.add(min(config for config, count in counts.items() if count == most))
        wanting = [near for near in wanting if not kept & near]
    return tuple(
        sorted(kept, key=lambda config: [ids.index(name) for name in kernels_of(config, 2)])
    )


def _near_best(problem: Problem) -> set[str]:
    limit = (1 + CLOSE) * min(problem.choices.values())
    return {config for config, us in problem.choices.items() if us <= limit}


def fitted(problems: Sequence[Problem], choices: Sequence[str]) -> Fit:
    """Fit what the kernels of a table need."""
    from moe_ext._configs import planner

    by_id, timed = _by_id(), []
    kernels = {name for config in choices for name in config.split("+")}
    for number, problem in enumerate(problems):
        case = problem.cell.case
        # Times of choices that a table leaves out say the same of their kernels.
        own = {c: us for c, us in problem.choices.items() if kernels.issuperset(c.split("+"))}
        if problem.table[0] == "gemm":
            # Two kernels were timed where they were hoped to be better: not what a kernel needs.
            alone = {config: us for config, us in own.items() if "+" not in config}
            own = alone or own
        for config, us in own.items():
            first, second = kernels_of(config, 2)
            terms = [
                planner().gemm_terms(
                    by_id[name].index,
                    problem.cell.num_rows,
                    case.num_experts,
                    *case.stage_shape(stage),
                    132,
                )
                for name, stage in zip((first, second), STAGES, strict=True)
            ]
            row_bytes = problem.cell.num_rows * (2 * case.hidden_size + case.intermediate_size)
            ratio = us / min(own.values())
            timed.append(Timed(number, (first, second), (terms[0], terms[1]), row_bytes, us, ratio))
    return fit(timed, layers=problems[0].table[0] == "layer")


def lines_of(problems: Sequence[Problem], choices: Sequence[str]) -> list[str]:
    """Return measured problems as tables have them, see `Measured`.

    Those of one size, of several routings and kinds of scales, are one: the geometric means of
    their best times, and of what each choice took over the best.
    """
    of_size: dict[tuple[int, int, int, int], list[Problem]] = {}
    for problem in problems:
        of_size.setdefault(problem.sizes, []).append(problem)
    return [_line_of(sizes, alike, choices) for sizes, alike in of_size.items()]


def _line_of(
    sizes: tuple[int, int, int, int], alike: Sequence[Problem], choices: Sequence[str]
) -> str:
    timed = [
        {config: us for config, us in problem.choices.items() if config in choices}
        for problem in alike
    ]
    bests = [min(own.values()) for own in timed]
    ratios = [
        geometric_mean(
            us[config] / best for us, best in zip(timed, bests, strict=True) if config in us
        )
        if any(config in us for us in timed)
        else math.nan
        for config in choices
    ]
    least = min(ratio for ratio in ratios if not math.isnan(ratio))
    over = [
        "-" if math.isnan(ratio) else str(round(1000 * min(ratio / least - 1, MOST_OVER)))
        for ratio in ratios
    ]
    return " ".join([*map(str, sizes), f"{least * geometric_mean(bests):.1f}", *_shortened(over)])


def _shortened(over: Sequence[str]) -> Iterator[str]:
    """Count the choices in a row that were not timed."""
    for word, alike in itertools.groupby(over):
        words = list(alike)
        if word == "-" and len(words) > 1:
            yield f"-{len(words)}"
        else:
            yield from words


def make_table(problems: Sequence[Problem], **options: float) -> Measured:
    """Return the table of problems, all of one, as the dispatcher would have it."""
    from moe_ext._dispatch_measured import Measured

    choices = choices_of(problems)
    found = fitted(problems, choices)
    return Measured(
        *problems[0].table[1:],
        choices=choices,
        costs=found.costs,
        common=found.common,
        problems="\n".join(lines_of(problems, choices)),
        where="",
        **options,  # type: ignore[arg-type]
    )


def chosen_by(table: Measured, problem: Problem) -> str:
    """Return what a table chooses: for a pair each GEMM is asked about by itself."""
    cell, case = problem.cell, problem.cell.case
    if cell.op == LAYER:
        allowed = _bits(table, problem.times)
        sizes = (case.num_experts, case.hidden_size, case.intermediate_size)
        return table.layer(cell.num_rows, *sizes, table.sm_count, allowed).choice
    from moe_ext._configs import matching_configs

    names = []
    for stage, sums in zip(cell.stages, stage_sums(cell, problem.variant), strict=True):
        allowed = table.allowed(config.id for config in matching_configs(cell.dtype, sums))
        shape = (case.num_experts, *case.stage_shape(stage))
        names.append(table.gemm(cell.num_rows, *shape, table.sm_count, allowed).choice)
    if problem.whole_rows:
        names[-1] = problem.whole_rows
    return joined(names)


def _bits(table: Measured, choices: Iterable[str]) -> int:
    known = set(choices)
    return sum(1 << index for index, name in enumerate(table.compiled) if name in known)


def regret_of(config: str, times: dict[str, float]) -> float | None:
    """Return what a configuration costs over the best; of two kernels that were not timed together
    what the worse of both costs."""
    best = min(times.values())
    if config in times:
        return times[config] / best - 1
    apart = [times[name] for name in config.split("+") if name in times]
    return max(apart) / best - 1 if len(apart) == 2 else None
