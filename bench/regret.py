"""What the dispatcher's choice costs where nobody tuned: `python -m bench.regret --out rows.jsonl`.

Times its kernels and every other that fits on held-out problems (`bench.regret_cases`). A later run
with the same file goes on where the one before ended, and again over cases whose timings disagreed;
--limit-seconds ends a run early. With --read a report is made of rows and nothing is measured; with
--now besides, of what the dispatcher as it is now would have cost, by the times in the rows.
"""

# argparse, not typer: the machine with the GPU may hold nothing but Python and PyTorch.
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.appending import check_appendable, open_to_append
from bench.arguments import whole
from bench.candidates import (
    H200_SMS,
    accumulate_of,
    candidates,
    choice,
    decision_of,
    layer_of,
    stage_sums,
)
from bench.contest import both_us, disagreement, hold_contest
from bench.files import refused_in_a_line
from bench.layer import make_layer
from bench.measure import Environment, make_out_buffers
from bench.ops import LAYER
from bench.pools import Pools, planned, shrunk
from bench.power import BURST, POWERS, PowerPolicy
from bench.problem import Cell, Plan, make_problem
from bench.progress import PLAIN_INTERVAL_S, counted
from bench.providers.base import Variant
from bench.providers.moe_ext import MoeExt
from bench.providers.moe_ext_layer import MoeExtLayer
from bench.regret_cases import NUM_CASES, SEED, HeldOut, held_out
from bench.regret_page import page
from bench.regret_rows import (
    BARS,
    CASE_OP,
    RegretCaseRow,
    RegretRow,
    latest_cases,
    load_regret_rows,
    summarise_regret,
    to_json,
    verdicts,
)
from bench.rows import Row
from bench.run import DRY_RUN_POLICY
from bench.timing import TimingPolicy, first_pass
from bench.tune_problems import regret_of

SAMPLES = 7
ATTEMPTS = 2


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.regret", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("regret.jsonl"), help="read first, then appended to")
    add("--cases", type=whole(1), default=NUM_CASES, help="how many")
    add("--seed", type=int, default=SEED)
    add("--limit-seconds", type=float, default=None, help="start no case after that time")
    add("--power", choices=POWERS, default=BURST)
    add("--samples", type=whole(1), default=SAMPLES, help="graph replays per measurement, at least")
    add("--commit", default=None, help="revision for the rows; read from git by default")
    add("--dry-run", action="store_true", help="miniatures on the CPU, wall-clock times")
    add("--read", type=Path, help="rows to report on, in place of measuring")
    add("--now", action="store_true", help="with --read: what is chosen now, by the rows' times")
    add("--markdown", type=Path, help="write tables here")
    add("--check", action="store_true", help="fail where a bar is missed")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure into a file or read one, then say what came out."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    with refused_in_a_line(parser):
        if args.read is None:
            _measure_into(args)
        rows = load_regret_rows(args.read or args.out)
    if args.now:
        rows = [rechosen(row) for row in latest_cases(rows)]
    cases = latest_cases(rows)
    if args.markdown is not None:
        args.markdown.write_text(page(rows))
    if not cases:
        print("no case has been timed")
        return 1
    summary = summarise_regret(cases)
    print(line_of(summary))
    return int(args.check and not all(verdicts(summary).values()))


def line_of(row: RegretRow) -> str:
    """Say a summary in a line."""
    passed = verdicts(row)
    said = [
        f"{name} {'-' if value is None else f'{100 * value:.2f} %'} "
        f"({'within' if passed[name] else 'over'} {100 * BARS[name]:g} %)"
        for name, value in (("mean", row.mean), ("p95", row.p95), ("worst", row.worst))
    ]
    return (
        f"dispatch_regret over {row.num_cases} cases: {', '.join(said)}; {row.num_skipped} "
        f"skipped, {row.num_unsteady} disagree with themselves"
    )


def _measure_into(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    check_appendable(args.out)
    if not args.dry_run and not torch.cuda.is_available():
        raise SystemExit("bench: a CUDA device must be there, got none; --dry-run runs on the CPU")
    torch.set_float32_matmul_precision("highest")
    environment = Environment.detect("cpu" if args.dry_run else "cuda", args.commit)
    policy = TimingPolicy(samples=args.samples, power=PowerPolicy(args.power), clock=True)
    if args.dry_run:
        policy = replace(DRY_RUN_POLICY, samples=1)
    with open_to_append(args.out) as file:
        # A new file is empty, which is no file of rows to read.
        before = load_regret_rows(args.out) if args.out.stat().st_size else []
        done = {
            row.number: row
            for row in latest_cases(before)
            if row.seed == args.seed and row.regret is not None and not row.disagreement
        }
        left = [held_out(number, args.seed) for number in range(args.cases) if number not in done]
        print(f"{environment.device_name}, torch {torch.__version__}, commit {environment.commit}")
        print(policy.describe())
        print(f"{args.cases} cases, {args.cases - len(left)} of them done in {args.out}")
        said = started
        rows: list[RegretCaseRow] = list(done.values())
        with counted(len(left), "cases", every=1) as tick:
            for row in measure_cases(left, args, policy, environment):
                file.write(to_json(row) + "\n")
                file.flush()
                rows.append(row)
                tick()
                now = time.perf_counter()
                if not sys.stdout.isatty() and now - said > PLAIN_INTERVAL_S:
                    said = now
                    print(f"  after {now - started:.0f} s: {line_of(summarise_regret(rows))}")
                if args.limit_seconds is not None and now - started > args.limit_seconds:
                    break
        if len(rows) > len(done):
            file.write(to_json(summarise_regret(sorted(rows, key=lambda row: row.number))) + "\n")
        print(f"{len(rows)} of {args.cases} cases timed; {time.perf_counter() - started:.0f} s")


def measure_cases(
    cases: Sequence[HeldOut],
    args: argparse.Namespace,
    policy: TimingPolicy,
    environment: Environment,
) -> Iterator[RegretCaseRow]:
    """Yield a row for each case."""
    if args.dry_run:
        cases = [replace(case, cell=shrunk(case.cell)) for case in cases]
    cells = [case.cell for case in cases]
    pools = Pools(cells, policy, environment.device)
    for case, plan in zip(cases, planned(cells, policy), strict=True):
        yield measure_case(case, plan, pools, args.seed, policy, environment)


def measure_case(
    case: HeldOut,
    plan: Plan,
    pools: Pools,
    seed: int,
    policy: TimingPolicy,
    environment: Environment,
) -> RegretCaseRow:
    """Time every kernel on one case; again where its timings disagree."""
    cell, pool = case.cell, pools.of(plan)
    provider: Any = MoeExtLayer() if cell.op == LAYER else MoeExt()
    if cell.op == LAYER:
        problem: Any = make_layer(plan, pool)
    else:
        problem = make_problem(plan, pool, make_out_buffers([plan], environment.device))
    sm_count = environment.sm_count or H200_SMS
    names = candidates(cell, case.variant, sm_count)
    variants = [replace(case.variant, config=name) for name in names]
    rows: list[Row] = []
    why = ""
    for _ in range(ATTEMPTS):
        rows = hold_contest(
            provider, variants, problem, policy, environment, first_pass=first_pass(policy)
        )
        why = disagreement(rows)
        if not why or rows[0].median_us is None:
            break
    return row_of(case, plan, rows, seed, why, source_of(cell, case.variant, sm_count))


def source_of(cell: Cell, variant: Variant, sm_count: int = H200_SMS) -> str:
    """Return what the dispatcher's choice rests on, of each GEMM of a pair where they differ."""
    from moe_ext._fused_moe_kernels import decide_kernels

    if cell.op == LAYER:
        layer, accumulate = layer_of(cell, variant), accumulate_of(variant)
        return decide_kernels(layer, accumulate, False, False, sm_count).source
    sources = [
        decision_of(cell, variant, stage, sums, sm_count).source
        for stage, sums in zip(cell.stages, stage_sums(cell, variant), strict=True)
    ]
    return " and ".join(sorted(set(sources)))


def rechosen(row: RegretCaseRow) -> RegretCaseRow:
    """Return a row with the dispatcher's choice of now, by the times of its kernels.

    Of two kernels that were not timed together it is what the worse of both costs.
    """
    case = held_out(row.number, row.seed)
    sm_count = row.sm_count or H200_SMS
    config = choice(case.cell, case.variant, sm_count)
    times = {name: us for name, us in row.times.items() if us is not None}
    regret = regret_of(config, times) if times else None
    return replace(
        row,
        chosen=config,
        source=source_of(case.cell, case.variant, sm_count),
        chosen_us=None if regret is None else round((1 + regret) * min(times.values()), 3),
        best=min(times, key=lambda name: times[name], default=""),
        best_us=min(times.values(), default=None),
        regret=None if regret is None else round(regret, 5),
        skipped_reason="" if regret is not None else f"{config} was not timed",
    )


def row_of(
    case: HeldOut, plan: Plan, rows: Sequence[Row], seed: int, why: str, source: str
) -> RegretCaseRow:
    """Return the row of a case, whose first kernels are the dispatcher's choice."""
    cell, chosen = case.cell, rows[0]
    timed = [row for row in rows if row.median_us is not None]
    best = min(timed, key=both_us, default=None)
    regret = None
    if best is not None and chosen.median_us is not None:
        regret = round(both_us(chosen) / both_us(best) - 1, 5)
    return RegretCaseRow(
        op=CASE_OP,
        number=case.number,
        seed=seed,
        timed_op=cell.op,
        case=cell.case.name,
        model=cell.case.model,
        num_experts=cell.case.num_experts,
        top_k=cell.case.top_k,
        hidden_size=cell.case.hidden_size,
        intermediate_size=cell.case.intermediate_size,
        dtype=case.variant.dtype,
        scale=case.variant.scale,
        accumulate=case.variant.accumulate,
        routing=cell.routing,
        num_tokens=cell.num_tokens,
        active_experts=round(plan.active_experts, 2),
        max_rows=plan.max_rows,
        chosen=chosen.config,
        source=source,
        chosen_us=None if chosen.median_us is None else round(both_us(chosen), 3),
        best="" if best is None else best.config,
        best_us=None if best is None else round(both_us(best), 3),
        regret=regret,
        floor_us=chosen.floor_us,
        times={row.config: row.median_us for row in rows},
        disagreement=why if regret is not None else "",
        skipped_reason=chosen.skipped_reason,
        device=chosen.device,
        sm_count=chosen.sm_count,
        torch=chosen.torch,
        cuda=chosen.cuda,
        commit=chosen.commit,
        power=chosen.power,
    )


if __name__ == "__main__":
    raise SystemExit(main())
