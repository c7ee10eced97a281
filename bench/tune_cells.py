"""Rows of `bench.tune` by the cell they belong to, and what the dispatcher's choice costs there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.candidates import H200_SMS, choice
from bench.cases import STAGES, get_case
from bench.contest import both_us
from bench.layouts import CONTIGUOUS
from bench.ops import GEMM
from bench.problem import Cell
from bench.providers.base import Variant, joined
from bench.rows import Row, load_rows

WORST_SHOWN = 15
CellKey = tuple[str | int, ...]


def cell_key(row: Row) -> CellKey:
    """Return what tells the cells of a tuning file apart."""
    return (
        row.op,
        row.stage,
        row.case,
        row.dtype,
        row.scale,
        row.accumulate,
        row.routing,
        row.num_tokens,
        row.power,
    )


def cell_of(row: Row) -> tuple[Cell, Variant]:
    """Return the cell of a row, and how its operands are scaled and summed."""
    stages = (row.stage,) if row.op == GEMM else STAGES
    cell = Cell(get_case(row.case), stages, row.num_tokens, row.dtype, row.routing, op=row.op)
    return cell, Variant(row.dtype, row.scale, row.accumulate)


def all_visits(rows: Iterable[Row]) -> dict[CellKey, list[list[Row]]]:
    """Return every cell's visits, the last one first, each a row for each kernel; rows of older
    files, which do not tell visits apart, are one."""
    visits: dict[CellKey, dict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row.provider == "moe_ext" and row.layout == CONTIGUOUS and not row.batch_invariant:
            row = replace(row, config=joined(row.config.split("+")))
            visits[cell_key(row)][row.visit][row.config] = row
    return {
        key: [list(of_cell[visit].values()) for visit in sorted(of_cell, reverse=True)]
        for key, of_cell in visits.items()
    }


def latest_visits(rows: Iterable[Row]) -> dict[CellKey, list[Row]]:
    """Return the rows of every cell's last visit."""
    return {key: of_cell[0] for key, of_cell in all_visits(rows).items()}


def load_cells(paths: Iterable[Path]) -> dict[CellKey, list[Row]]:
    """Read the last visit of every cell from files of `bench.tune`."""
    return latest_visits(row for path in paths for row in load_rows(path))


@dataclass(frozen=True)
class CellResult:
    """All kernels timed on one cell, fastest first."""

    rows: list[Row]
    dispatched: str

    @property
    def best(self) -> Row:
        """The fastest kernel's row."""
        return self.rows[0]

    @property
    def regret(self) -> float:
        """Time of the dispatcher's kernel over the fastest one's, less 1; NaN when not timed."""
        chosen = next((row for row in self.rows if row.config == self.dispatched), None)
        return both_us(chosen) / both_us(self.best) - 1 if chosen else math.nan

    def describe(self) -> str:
        """Return one line: the best kernels and what the dispatcher takes."""
        best = self.best
        others = [
            f"{row.config} +{100 * (both_us(row) / both_us(best) - 1):.1f}%"
            for row in self.rows[1:3]
        ]
        return (
            f"{best.dtype} {best.scale} {best.accumulate} {best.case} {best.stage or best.op} "
            f"{best.routing} T={best.num_tokens}: "
            f"{best.config} {best.median_us:.1f} us, {best.ratio_to_floor:.2f} x floor; "
            f"then {', '.join(others) or 'none'}; "
            f"dispatcher {self.dispatched} +{100 * self.regret:.1f}%"
        )


def results_by_cell(rows: Iterable[Row]) -> list[CellResult]:
    """Return every cell with a time, and the choice of the package as it is installed."""
    results = []
    for of_cell in latest_visits(rows).values():
        timed = sorted((row for row in of_cell if row.median_us is not None), key=both_us)
        if timed:
            dispatched = choice(*cell_of(timed[0]), timed[0].sm_count or H200_SMS)
            results.append(CellResult(timed, dispatched))
    return results


def summary(results: Sequence[CellResult]) -> str:
    """Return the mean regret of the dispatcher and its worst cells."""
    timed = [result for result in results if not math.isnan(result.regret)]
    if not timed:
        return "no cell has a time of the dispatcher's kernel"
    mean = math.exp(sum(math.log1p(result.regret) for result in timed) / len(timed)) - 1
    worst = sorted(timed, key=lambda result: -result.regret)[:WORST_SHOWN]
    return "\n".join(
        [
            f"dispatcher: {100 * mean:.2f}% slower than the best kernel on average over "
            f"{len(timed)} cells ({len(results) - len(timed)} without a time); worst:",
            *(f"  {result.describe()}" for result in worst),
        ]
    )
