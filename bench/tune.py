"""Time every fitting kernel on every stage: `python -m bench.tune --out tune.jsonl`.

`--read tune.jsonl` prints the summary of a file again, with the regret of the dispatcher as it is
now: no GPU needed.
"""

# argparse, not typer: the machine with the GPU may hold nothing but Python and PyTorch.
from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.cases import Case, get_case
from bench.files import refused_in_a_line
from bench.layouts import CONTIGUOUS
from bench.measure import make_out_buffers, make_pool, measure
from bench.problem import make_problem
from bench.progress import Progress
from bench.providers.base import Variant
from bench.providers.moe_ext import MoeExt, dispatched
from bench.rows import Row, load_rows
from bench.run import add_grid_arguments, set_up

TUNE_SAMPLES = 7
# A kernel whose fastest warm-up replay is this much slower than the best so far is not timed on.
GIVE_UP_FACTOR = 1.25
WORST_SHOWN = 15


@dataclass(frozen=True)
class CellResult:
    """All kernels timed on one GEMM, fastest first."""

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
        return _time(chosen) / _time(self.best) - 1 if chosen else math.nan

    def describe(self) -> str:
        """Return one line: the best kernels and what the dispatcher takes."""
        best = self.best
        others = [
            f"{row.config} +{100 * (_time(row) / _time(best) - 1):.1f}%" for row in self.rows[1:3]
        ]
        return (
            f"{best.dtype} {best.scale} {best.accumulate} {best.case} {best.stage} "
            f"T={best.num_tokens}: "
            f"{best.config} {best.median_us:.1f} us, {best.ratio_to_floor:.2f} x floor; "
            f"then {', '.join(others) or 'none'}; "
            f"dispatcher {self.dispatched} +{100 * self.regret:.1f}%"
        )


def _time(row: Row) -> float:
    return math.inf if row.median_us is None else row.median_us


def results_by_cell(rows: Iterable[Row]) -> list[CellResult]:
    """Group the rows of a tuning file by GEMM; rows without a time are left out."""
    cells: dict[tuple[object, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row.provider == "moe_ext" and row.median_us is not None and row.layout == CONTIGUOUS:
            key = (
                row.dtype,
                row.accumulate,
                row.scale,
                row.routing,
                row.case,
                row.stage,
                row.num_tokens,
                row.power,
            )
            cells[key][row.config] = row
    return [
        CellResult(sorted(cell.values(), key=_time), _dispatched(next(iter(cell.values()))))
        for cell in cells.values()
    ]


def _dispatched(row: Row) -> str:
    """Return the kernel that the dispatcher of the installed package takes for the row's GEMM."""
    case: Case = get_case(row.case)
    return dispatched(
        Variant(row.dtype, row.scale, row.accumulate),
        row.stage,
        row.num_tokens * case.top_k,
        (case.num_experts, *case.stage_shape(row.stage)),
    )


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


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of `bench.tune`."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("tune.jsonl"), help="appended to")
    parser.add_argument("--configs", type=lambda text: text.split(","), default=["all"])
    parser.add_argument(
        "--read", type=Path, help="print the summary of this file and measure nothing"
    )
    parser.add_argument("--each", action="store_true", help="print one line per cell")
    add_grid_arguments(parser)
    parser.set_defaults(samples=TUNE_SAMPLES)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tuner or read its file."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    with refused_in_a_line(parser):
        rows = time_kernels(args) if args.read is None else load_rows(args.read)
    if args.dry_run:
        return 0
    results = results_by_cell(rows)
    if args.each:
        for result in results:
            print(result.describe())
    print(summary(results))
    return 0


def time_kernels(args: argparse.Namespace) -> list[Row]:
    """Time the kernels on both stages of every cell, the dispatcher's choice first."""
    environment, policy, plans = set_up(args, "grouped_gemm")
    provider = MoeExt()
    rows: list[Row] = []
    choices = {
        plan.cell.dtype: provider.variants(plan.cell.dtype, args.accumulate, args.scales, [])
        for plan in plans
    }
    total = sum(len(choices[plan.cell.dtype]) for plan in plans)
    with Progress(total) as progress, args.out.open("a") as file:
        out_buffers = make_out_buffers(plans, environment.device)
        pool = None
        for plan in plans:
            if args.budget is not None and progress.seconds > args.budget:
                progress.say(f"budget spent: {progress.total - progress.done} cells left out")
                break
            if pool is None or pool.dtype != plan.cell.dtype:
                pool = None  # frees the old one first
                pool = make_pool(plans, plan.cell.dtype, environment.device)
            problem = make_problem(plan, pool, out_buffers)
            for choice in choices[plan.cell.dtype]:
                first = provider.config_name(problem, choice)
                variants = provider.variants(
                    plan.cell.dtype, [choice.accumulate], [choice.scale], args.configs
                )
                best, row = math.inf, None
                for variant in sorted(variants, key=lambda v: v.config != first):
                    row = measure(
                        provider, variant, problem, policy, environment, GIVE_UP_FACTOR * best
                    )
                    best = min(best, _time(row))
                    file.write(row.to_json() + "\n")
                    rows.append(row)
                if row is not None:
                    progress.add(replace(row, ratio_to_floor=best / row.floor_us))
            file.flush()
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
