"""Eager calls of a layer, none like another: `python -m bench.stability --out stability.jsonl`.

Each call has a token count and a routing that the process has not seen. What a first call costs and
what is loaded later is measured in fresh processes. With --read, tables and a plot are made of rows
and nothing is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.arguments import whole, wholes
from bench.cases import ROUTINGS, case_names, extra_case_names
from bench.files import refused_in_a_line
from bench.layer import LAYER_SCALES
from bench.measure import Environment
from bench.processes import ProcessLog
from bench.progress import counted
from bench.stability_child import policy_of, run_child
from bench.stability_layer import LAYERS, is_there, make_calls
from bench.stability_page import label_of, line_of, page, plot
from bench.stability_plan import Setting, plan_calls, predicted_us, tail_of
from bench.stability_rows import (
    DispatchHostRow,
    PreloadRow,
    StabilityKind,
    StabilityRow,
    load_stability_rows,
    to_json,
)
from bench.stability_time import Pass, time_calls

OUT = Path("stability.jsonl")
FIRST_CALL_TOKENS = 64
FIRST_CALL_REPEATS = 21
DRY_RUN: dict[str, Any] = {"num_calls": 12, "max_tokens": 16}


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.stability", description=__doc__)
    add = parser.add_argument
    add("--all-tokens", action="store_true", help="token counts that all differ (the default)")
    add("--same-tokens", type=wholes(1), default=[], help="of all calls; one row for each: 64,256")
    add("--dispatch-host", action="store_true", help="what the dispatcher's choice costs the host")
    add("--out", type=Path, help=f"JSONL file, appended to; {OUT} if not a dry run")
    add("--providers", type=_providers, default=list(LAYERS))
    add("--case", choices=[*case_names(), *extra_case_names()], default="qwen3-30b")
    add("--dtype", choices=["bf16", "fp8"], default="fp8")
    add("--scale", choices=LAYER_SCALES, default="block128", help="of FP8 weights")
    add("--routing", choices=ROUTINGS, default="zipf0.6")
    add("--calls", type=whole(1), default=2000)
    add("--max-tokens", type=whole(1), default=8192)
    add("--seed", type=whole(0), default=1_000_000, help="of token counts and routings")
    add("--no-preload", action="store_true", help="let CUDA load kernels as they come")
    add("--no-children", action="store_true", help="leave out what takes fresh processes")
    add("--commit", default=None, help="revision for the rows; read from git by default")
    add("--dry-run", action="store_true", help="a miniature on the CPU, without a file")
    add("--read", type=Path, help="rows to report on, in place of measuring")
    add("--markdown", type=Path, help="write tables here")
    add("--plot", type=Path, help="write a PNG here; needs matplotlib")
    return parser


def _providers(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in LAYERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be among {','.join(LAYERS)}, got {text!r}")
    return names


def _token_counts(args: argparse.Namespace) -> list[int | None]:
    """Return what to measure layers with: counts of all calls, None where they all differ."""
    all_differ = args.all_tokens or not (args.same_tokens or args.dispatch_host)
    return [*([None] if all_differ else []), *args.same_tokens]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or read, then write what was asked for."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    if None in _token_counts(args) and args.calls > args.max_tokens:
        parser.error(
            f"argument --calls: must be at most --max-tokens = {args.max_tokens} for token counts "
            f"that all differ, got {args.calls}"
        )
    path = args.read or args.out or (None if args.dry_run else OUT)
    rows = _measure(args, path) if args.read is None else []
    if path is not None and (rows or args.read is not None):
        with refused_in_a_line(parser):
            rows = load_stability_rows(path)
    if args.markdown is not None:
        args.markdown.write_text(page(rows))
    if args.plot is not None:
        plot(rows, args.plot)
    return 0


def _measure(args: argparse.Namespace, path: Path | None) -> list[StabilityKind]:
    """Return the rows, each written to `path`, where there is one, as soon as it is there."""
    token_counts = _token_counts(args)
    # Of the choice on the host alone a machine without a GPU can tell.
    if token_counts and not args.dry_run and not torch.cuda.is_available():
        raise SystemExit("bench: a CUDA device must be there, got none; --dry-run runs on the CPU")
    on_cpu = args.dry_run or not torch.cuda.is_available()
    environment = Environment.detect("cpu" if on_cpu else "cuda", args.commit)
    parts: list[Iterator[StabilityKind]] = []
    if args.dispatch_host:
        parts.append(measure_dispatch(environment))
    if token_counts:
        parts.append(_measure_layers(args, token_counts, environment))
    rows = []
    with contextlib.nullcontext() if path is None else path.open("a") as file:
        for row in itertools.chain.from_iterable(parts):
            rows.append(row)
            if file is not None:
                file.write(to_json(row) + "\n")
                file.flush()
            print(line_of(row), flush=True)
    return rows


def _columns(environment: Environment) -> dict[str, Any]:
    return {
        "device": environment.device_name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "commit": environment.commit,
    }


def measure_dispatch(environment: Environment) -> Iterator[DispatchHostRow]:
    """Yield what a choice costs for new problems, then for those met before."""
    from bench.dispatch_host import time_choices

    for met_before in (False, True):
        timed = time_choices(met_before=met_before)
        yield DispatchHostRow(
            op="dispatch_host",
            met_before=met_before,
            us=round(timed.median_us, 3),
            max_us=round(timed.max_us, 3),
            num_problems=timed.num_questions,
            **_columns(environment),
        )


def _measure_layers(
    args: argparse.Namespace, token_counts: Sequence[int | None], environment: Environment
) -> Iterator[StabilityKind]:
    log = ProcessLog()
    for provider in args.providers:
        if not is_there(provider):
            print(f"provider {provider} is skipped: the package must be there, got none")
            continue
        setting = Setting(
            provider=provider,
            case_name=args.case,
            dtype=args.dtype,
            scale="none" if args.dtype == "bf16" else args.scale,
            routing=args.routing,
            num_calls=args.calls,
            max_tokens=args.max_tokens,
            same_tokens=None,
            seed=args.seed,
            preload=provider == "moe_ext" and not args.no_preload and not args.dry_run,
            dry_run=args.dry_run,
        )
        if args.dry_run:
            setting = replace(setting, **DRY_RUN)
        first_call_ms = None
        if not args.no_children:
            try:
                first_call_ms, preload_row = measure_first_call(setting, environment)
            except RuntimeError as error:
                print(f"provider {provider}: {error}")
            else:
                yield from [preload_row] if preload_row is not None else []
        for tokens in token_counts:
            now = replace(setting, same_tokens=tokens)
            children = not args.no_children
            yield measure_calls(now, environment, log, first_call_ms, children=children)


def measure_first_call(
    setting: Setting, environment: Environment
) -> tuple[float, PreloadRow | None]:
    """Return the milliseconds of a first call without preloading; with it, where it is asked for,
    a row."""
    setting = replace(setting, same_tokens=FIRST_CALL_TOKENS, num_calls=FIRST_CALL_REPEATS)
    without = run_child("first_call", replace(setting, preload=False))["first_call_ms"]
    if not setting.preload:
        return without, None
    result = run_child("first_call", setting)
    return without, PreloadRow(
        op="preload",
        ms=round(result["preload_ms"], 2),
        mib=round(result["preload_bytes"] / 2**20, 2),
        num_kernels=result["num_kernels"],
        case=setting.case.name,
        dtype=setting.dtype,
        scale=setting.scale,
        num_tokens=FIRST_CALL_TOKENS,
        first_call_ms=round(result["first_call_ms"], 4),
        median_ms=round(result["median_ms"], 4),
        first_call_without_ms=round(without, 4),
        **_columns(environment),
    )


def measure_calls(
    setting: Setting,
    environment: Environment,
    log: ProcessLog,
    first_call_ms: float | None,
    *,
    children: bool,
) -> StabilityRow:
    """Make all calls of a setting; a provider that fails is skipped with its reason."""
    late = None
    planned = plan_calls(setting)
    row = StabilityRow(
        op="stability",
        provider=setting.provider,
        case=setting.case.name,
        dtype=setting.dtype,
        scale=setting.scale,
        routing=setting.routing,
        num_tokens=setting.same_tokens,
        num_calls=setting.num_calls,
        preload=setting.preload,
        **_columns(environment),
    )
    try:
        calls = make_calls(setting, planned, environment.device, policy_of(setting))
        if setting.preload:
            from moe_ext import preload

            preload(environment.device)
        calls.warm_allocator(calls.scratch_bytes)
        compilers = len(log.compilers())
        with counted(len(planned), label_of(row)) as tick:
            timed = time_calls(calls, environment, tick)
        compilations = len(log.compilers()) - compilers
        if children:
            late = run_child("late_loads", setting)["modules_loaded_late"]
    except Exception as error:  # a peer's, of any kind
        return replace(row, skipped_reason=f"{type(error).__name__}: {error}"[:300])
    slowest = max(range(len(planned)), key=lambda index: timed.calls[index].wall_us)
    predicted = predicted_us(setting, planned[slowest])
    return replace(
        row,
        **summary(timed),
        slowest_over_predicted=round(timed.calls[slowest].wall_us / predicted, 4),
        first_call_ms=None if first_call_ms is None else round(first_call_ms, 4),
        compilations=compilations,
        modules_loaded_late=late,
    )


def summary(timed: Pass) -> dict[str, Any]:
    """Return the columns that the times of single calls give."""
    walls = [(call.wall_us, call.floor_us) for call in timed.calls]
    devices = [(call.device_us, call.floor_us) for call in timed.calls]
    columns: dict[str, Any] = {}
    for prefix, times in (("", walls), ("device_", devices)):
        p50, p99, p999, largest = (round(value, 2) for value in tail_of([us for us, _ in times]))
        ratios = (round(value, 4) for value in tail_of([us / floor for us, floor in times]))
        names = ("p50", "p99", "p999", "max")
        columns |= {
            f"{prefix}{name}_us": us
            for name, us in zip(names, (p50, p99, p999, largest), strict=True)
        }
        columns |= {
            f"{prefix}ratio_{name}": ratio for name, ratio in zip(names, ratios, strict=True)
        }
    columns["late_mib"] = round(timed.late_bytes / 2**20, 3)
    columns["calls"] = tuple(
        (
            call.num_tokens,
            round(call.wall_us, 2),
            round(call.device_us, 2),
            round(call.floor_us, 2),
        )
        for call in timed.calls
    )
    return columns


if __name__ == "__main__":
    raise SystemExit(main())
