"""Measure cases with providers: `python -m bench.run --cases mixtral --providers moe_ext,torch`."""

# argparse, not typer: the machine with the GPU may hold nothing but Python and PyTorch.
from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.appending import check_appendable
from bench.arguments import kernels, whole, wholes
from bench.cases import ROUTINGS, TOKENS, Case, case_names, extra_case_names, get_case
from bench.files import refused_in_a_line
from bench.floors import floor_us
from bench.layer import TENSOR_STATIC, make_layer
from bench.layouts import CONTIGUOUS, LAYOUTS
from bench.measure import (
    LAYER_PROVIDERS,
    PROVIDERS,
    Environment,
    make_out_buffers,
    make_plans,
    make_pool,
    measure,
    skip,
)
from bench.ops import LAYER, OPS, PAIR
from bench.power import BURST, POWERS, PowerPolicy
from bench.problem import Plan, make_problem
from bench.progress import Progress
from bench.providers.base import Provider, Variant
from bench.scales import SCALES
from bench.timing import TimingPolicy

# A provider takes those that it has: TENSOR_STATIC is of whole layers, and they have no mixtures.
ALL_SCALES = [*SCALES, TENSOR_STATIC]
DRY_RUN_TOKENS = (1, 4, 16)
DRY_RUN_POLICY = TimingPolicy(samples=3, warmup=0, l2_bytes=1.0, graph_us=1.0)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of `bench.run`."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    add = parser.add_argument
    add("--op", choices=OPS, default=PAIR)
    add("--out", type=Path, default=Path("results.jsonl"), help="JSONL file, appended to")
    add("--providers", type=_names(list(PROVIDERS)), default=list(PROVIDERS))
    add("--layout", choices=LAYOUTS, default=CONTIGUOUS, help="of the activations")
    add("--batch-invariant", action="store_true", help="whole layers in their batch-invariant mode")
    add("--configs", type=kernels, default=[], help="moe_ext kernels to force: all, or ids")
    add_grid_arguments(parser)
    return parser


def add_grid_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `bench.run` and `bench.tune` share."""
    add = parser.add_argument
    cases = _names(case_names(), extra_case_names())
    add("--cases", type=cases, default=case_names(), help="all, or names, some only by name")
    add("--tokens", type=wholes(1), default=list(TOKENS), help="tokens before top-k")
    add("--dtypes", type=_names(["bf16", "fp8"]), default=["bf16", "fp8"])
    add("--accumulate", type=_names(["promoted", "fast"]), default=["promoted", "fast"])
    add("--scales", type=_names(ALL_SCALES), default=["tensor"], help="FP8 scale layouts")
    add("--routing", type=_names(list(ROUTINGS)), default=["zipf0.6"])
    add("--power", choices=POWERS, default=BURST, help="before or at the card's power limit")
    add("--samples", type=whole(1), default=20, help="graph replays per measurement, at least")
    add("--budget", type=float, default=None, help="seconds after which no row is started")
    add("--commit", default=None, help="revision for the rows; read from git by default")
    add("--dry-run", action="store_true", help="miniature cases on the CPU, wall-clock times")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _names(everything: list[str], extra: Sequence[str] = ()) -> Callable[[str], list[str]]:
    """Return a parser of names; "all" does not mean those in `extra`."""
    known = [*everything, *extra]

    def parse(text: str) -> list[str]:
        words = everything if text == "all" else _words(text)
        unknown = [word for word in words if word not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"must be all or among {','.join(known)}, got {','.join(unknown)}"
            )
        return words

    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 when a provider gave a wrong result."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    with refused_in_a_line(parser):
        check_appendable(args.out)
    environment, policy, plans = set_up(args, args.op, layout=args.layout)
    providers = _present(args.op, args.providers, args.layout, args.batch_invariant)
    jobs = _jobs(plans, providers, args)
    wrong = 0
    with (
        Progress(sum(len(variants) for _, variants in jobs)) as progress,
        args.out.open("a") as file,
    ):
        fitting = [plan for plan in plans if not plan.skipped_reason]
        gemms = [plan for plan in fitting if plan.cell.op != LAYER]
        out_buffers = make_out_buffers(gemms, environment.device)
        pool, case = None, None
        for plan, variants in jobs:
            if args.budget is not None and progress.seconds > args.budget:
                progress.say(f"budget spent: {progress.total - progress.done} rows left out")
                break
            cell = plan.cell
            if plan.skipped_reason:
                for provider, variant in variants:
                    row = skip(provider, variant, plan, policy, environment)
                    file.write(row.to_json() + "\n")
                    progress.add(row)
                continue
            if environment.device.type == "cuda" and case != cell.case:
                torch.cuda.empty_cache()  # outputs that providers allocated in their graphs
            case = cell.case
            if pool is None or pool.dtype != cell.dtype:
                pool = None  # frees the old one first
                pool = make_pool(fitting, cell.dtype, environment.device)
            problem: Any = (
                make_layer(plan, pool)
                if cell.op == LAYER
                else make_problem(plan, pool, out_buffers)
            )
            for provider, variant in variants:
                row = measure(provider, variant, problem, policy, environment)
                file.write(row.to_json() + "\n")
                file.flush()
                wrong += row.skipped_reason.startswith("wrong")
                progress.add(row)
    print(f"{progress.done} rows in {progress.seconds:.1f} s, {wrong} wrong: {args.out}")
    return 1 if wrong else 0


def set_up(
    args: argparse.Namespace, *ops: str, layout: str = CONTIGUOUS
) -> tuple[Environment, TimingPolicy, list[Plan]]:
    """Print the header, draw the routings and plan the cells; dtype outermost, then op."""
    cases: list[Case] = [get_case(name) for name in args.cases]
    policy = TimingPolicy(samples=args.samples, power=PowerPolicy(args.power))
    device = "cuda"
    if args.dry_run:
        cases = [case.shrunk() for case in cases]
        policy, device = replace(DRY_RUN_POLICY, power=policy.power), "cpu"
        args.tokens = [tokens for tokens in args.tokens if tokens in DRY_RUN_TOKENS] or [1]
    elif not torch.cuda.is_available():
        raise SystemExit("bench: a CUDA device must be there, got none; --dry-run runs on the CPU")
    # The references of the checks need fp32 products, whatever the caller's default is.
    torch.set_float32_matmul_precision("highest")
    environment = Environment.detect(device, args.commit)
    started = time.perf_counter()
    plans = [
        plan
        for dtype in args.dtypes
        for op in ops
        for plan in make_plans(op, cases, args.tokens, [dtype], args.routing, policy, layout)
    ]
    print(f"{environment.device_name}, torch {torch.__version__}, commit {environment.commit}")
    print("dry run: wall-clock times of miniatures" if args.dry_run else policy.describe())
    print(
        f"{len(plans)} cells planned and drawn in {time.perf_counter() - started:.1f} s; at their "
        f"floors their samples take {sum(_floor_s(plan, policy) for plan in plans):.1f} s per "
        f"variant"
    )
    return environment, policy, plans


def _floor_s(plan: Plan, policy: TimingPolicy) -> float:
    replay_us = floor_us(plan.work, plan.cell.dtype) * plan.calls
    schedule = policy.power.schedule(policy.samples, replay_us, compute_heavy=plan.compute_heavy)
    return schedule.seconds(replay_us)


def _present(
    op: str, names: Sequence[str], layout: str, batch_invariant: bool
) -> list[Provider[Any]]:
    """Return the providers that can run here, and say why others are skipped."""
    known: Mapping[str, type[Provider[Any]]] = LAYER_PROVIDERS if op == LAYER else PROVIDERS
    present = []
    for name in names:
        if name not in known:
            print(f"provider {name} is skipped: it has no {op}")
            continue
        provider = known[name]()
        if layout not in provider.layouts:
            print(f"provider {name} is skipped: it has no {layout} layout")
        elif batch_invariant and not provider.batch_invariant:
            print(f"provider {name} is skipped: it has no batch-invariant mode of {op}")
        elif not provider.available():
            print(f"provider {name} is skipped: {provider.needs} must be there, got none")
        else:
            present.append(provider)
    return present


def _jobs(
    plans: Sequence[Plan], providers: Sequence[Provider[Any]], args: argparse.Namespace
) -> list[tuple[Plan, list[tuple[Provider[Any], Variant]]]]:
    """Pair every cell with the variants to measure on it."""
    return [
        (
            plan,
            [
                (provider, replace(variant, batch_invariant=args.batch_invariant))
                for provider in providers
                for variant in provider.variants(
                    plan.cell.dtype, args.accumulate, args.scales, args.configs
                )
            ],
        )
        for plan in plans
    ]


if __name__ == "__main__":
    raise SystemExit(main())
