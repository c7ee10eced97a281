"""Time every fitting kernel on every cell of a grid: `python -m bench.tune --out tune.jsonl`.

With --draw N the cells are the first N problems of `bench.tune_draw` in place of a grid, each timed
in two passes: all kernels by few samples, then those near the best.
A later run with the same file goes on where the one before ended, and again over cells whose two
timings or clocks disagreed. `--read tune.jsonl` prints the summary of a file again, with the regret
of the dispatcher as it is now: no GPU needed. `bench.tune_tables` makes the dispatcher's tables of
such files.
"""

# argparse, not typer: the machine with the GPU may hold nothing but Python and PyTorch.
from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.appending import check_appendable, open_to_append
from bench.arguments import kernels, whole
from bench.candidates import H200_SMS, candidates
from bench.cases import tuned_case_names
from bench.contest import disagreement, hold_contest, time_of
from bench.files import refused_in_a_line
from bench.layer import LAYER_SCALES, make_layer
from bench.measure import Environment, make_out_buffers
from bench.ops import GEMM, LAYER, OPS, PAIR
from bench.pools import Pools, planned, shrunk
from bench.problem import Cell, Plan, make_problem
from bench.progress import Progress
from bench.providers.base import Provider, Variant, accumulations, kernels_of
from bench.providers.moe_ext import MoeExt
from bench.providers.moe_ext_layer import MoeExtLayer
from bench.rows import Row, load_rows
from bench.run import add_grid_arguments, set_up
from bench.scales import SCALES
from bench.timing import TimingPolicy, first_pass
from bench.tune_cells import CellKey, latest_visits, results_by_cell, summary
from bench.tune_draw import SEED, drawn

TUNE_SAMPLES = 7
Job = tuple[Cell, Variant, list[str]]
"""A cell, how its operands are scaled and summed, and the kernels to time."""


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of `bench.tune`."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("tune.jsonl"), help="read first, then appended to")
    add("--op", type=_ops, default=[PAIR, LAYER], help=f"any of {','.join(OPS)}")
    add("--configs", type=kernels, default=["all"])
    add("--read", type=Path, help="print the summary of this file and measure nothing")
    add("--each", action="store_true", help="print one line per cell")
    add("--draw", type=whole(1), help="this many drawn problems in place of a grid")
    add("--seed", type=int, default=SEED, help="of --draw")
    add_grid_arguments(parser)
    parser.set_defaults(
        samples=TUNE_SAMPLES,
        cases=tuned_case_names(),
        scales=["tensor", "block128"],
        accumulate=["promoted"],
    )
    return parser


def _ops(text: str) -> list[str]:
    ops = text.split(",")
    if not set(ops) <= set(OPS):
        raise argparse.ArgumentTypeError(f"must be among {','.join(OPS)}, got {text}")
    return ops


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tuner or read its file."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    with refused_in_a_line(parser):
        if args.read is None:
            time_kernels(args)
        if args.dry_run:
            return 0
        results = results_by_cell(load_rows(args.read or args.out))
    if args.each:
        for result in results:
            print(result.describe())
    print(summary(results))
    return 0


def variants_of(op: str, dtype: str, args: argparse.Namespace) -> list[Variant]:
    """Return the ways to scale and to sum that are asked for.

    A layer's first GEMM has no kernels that sum fast, so its cells are those of promoted ones.
    """
    known = LAYER_SCALES if op == LAYER else SCALES
    accumulates = ["promoted"] if op == LAYER else args.accumulate
    scales = [scale for scale in args.scales if scale in known]
    return [Variant(dtype, *kind) for kind in accumulations(dtype, accumulates, scales)]


def make_jobs(
    cells: Iterable[tuple[Cell, Variant]], configs: Sequence[str], environment: Environment
) -> list[Job]:
    """List the cells with the kernels to time on each, the dispatcher's choice first."""
    jobs = []
    for cell, variant in cells:
        first, *others = candidates(cell, variant, environment.sm_count or H200_SMS)
        kept = [name for name in others if _wanted(name, cell.op, configs)]
        jobs.append((cell, variant, [first, *kept]))
    return jobs


def _wanted(name: str, op: str, configs: Sequence[str]) -> bool:
    kernels = kernels_of(name, 1 if op == GEMM else 2)
    return "all" in configs or any(kernel in configs for kernel in kernels)


def job_key(cell: Cell, variant: Variant, power: str) -> CellKey:
    """Return the key of a job's rows, `bench.tune_cells.cell_key`."""
    return (
        cell.op,
        cell.stages[0] if cell.op == GEMM else "",
        cell.case.name,
        variant.dtype,
        variant.scale,
        variant.accumulate,
        cell.routing,
        cell.num_tokens,
        power,
    )


def is_done(job: Job, rows: Sequence[Row]) -> bool:
    """Whether a cell's last visit has all kernels of the job, and says something."""
    return {row.config for row in rows} >= set(job[2]) and not disagreement(rows)


def time_kernels(args: argparse.Namespace) -> None:
    """Time the kernels of every cell that the output file does not have yet."""
    check_appendable(args.out)
    environment, policy, plans = set_up(args, *([] if args.draw else args.op))
    policy = replace(policy, clock=environment.device.type == "cuda")
    if args.draw:
        cells = problems(args)
    else:
        cells = [
            (plan.cell, variant)
            for plan in plans
            for variant in variants_of(plan.cell.op, plan.cell.dtype, args)
        ]
    with open_to_append(args.out) as file:
        # A new file is empty, which is no file of rows to read.
        before = latest_visits(load_rows(args.out) if args.out.stat().st_size else [])
        jobs = make_jobs(cells, args.configs, environment)
        power = policy.power.regime
        left = [job for job in jobs if not is_done(job, before.get(job_key(*job[:2], power), []))]
        print(f"{len(jobs)} cells, {len(jobs) - len(left)} of them done in {args.out}")
        unsteady = []
        with Progress(len(left)) as progress:
            visits = contests(left, plans, policy, environment, quick_first=bool(args.draw))
            while progress.done < len(left):
                if args.budget is not None and progress.seconds > args.budget:
                    break
                rows = next(visits)
                file.write("".join(row.to_json() + "\n" for row in rows))
                file.flush()
                best = min(rows, key=time_of)
                progress.add(best)
                why = disagreement(rows)
                if why:
                    unsteady.append(
                        f"{best.op} {best.case} {best.dtype} {best.scale} "
                        f"{best.routing} T={best.num_tokens}: {why}"
                    )
        print(
            f"{progress.done} cells in {progress.seconds:.0f} s, {len(left) - progress.done} left"
        )
        if unsteady:
            print(f"{len(unsteady)} cells that disagree with themselves; the same command goes")
            print("over them again:", *unsteady, sep="\n  ")


def problems(args: argparse.Namespace) -> list[tuple[Cell, Variant]]:
    """Return the problems to draw, each once, of the ops and dtypes that are asked for."""
    every = (drawn(number, args.seed) for number in range(args.draw))
    return [
        (shrunk(cell) if args.dry_run else cell, variant)
        for cell, variant in dict.fromkeys(every)
        if cell.op in args.op and cell.dtype in args.dtypes
    ]


def contests(
    jobs: Sequence[Job],
    plans: Iterable[Plan],
    policy: TimingPolicy,
    environment: Environment,
    *,
    quick_first: bool,
) -> Iterator[list[Row]]:
    """Yield the rows of each job's contest; cells without a plan are planned as their turn comes.

    Jobs of one cell are held one after another, where its first is, and share its tensors.
    """
    known = {plan.cell: plan for plan in plans}
    of_cell: dict[Cell, list[Job]] = {}
    for job in jobs:
        of_cell.setdefault(job[0], []).append(job)
    cells = list(of_cell)
    pools = Pools(cells, policy, environment.device)
    rest = planned([cell for cell in cells if cell not in known], policy)
    providers: dict[bool, Provider[Any]] = {False: MoeExt(), True: MoeExtLayer()}
    for cell, same in of_cell.items():
        plan = known.get(cell) or next(rest)
        pool = pools.of(plan)
        if cell.op == LAYER:
            problem: Any = make_layer(plan, pool)
        else:
            problem = make_problem(plan, pool, make_out_buffers([plan], environment.device))
        for _, variant, names in same:
            yield hold_contest(
                providers[cell.op == LAYER],
                [replace(variant, config=name) for name in names],
                problem,
                policy,
                environment,
                first_pass=first_pass(policy) if quick_first else None,
            )


if __name__ == "__main__":
    raise SystemExit(main())
