"""Plan a layer with super experts and measure what the plan is worth.

    python -m bench.precision_plan --out precision.jsonl
    python -m bench.precision_plan --read precision.jsonl --check --markdown docs/precision.md

A seeded layer (`moe_ext.precision.realistic_layer`) is calibrated on some tokens, planned under a
byte budget, and run on others in FP8, under the plan and in BF16. Needs no GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from moe_ext.precision import (
    ExpertBank,
    PlannedPrecision,
    PrecisionStats,
    RealisticLayer,
    Tokens,
    calibrate,
    plan_precision,
    realistic_layer,
)
from torch import Tensor
from torch.nn import functional

from bench.cases import Case, case_names, get_case
from bench.measure import Environment
from bench.precision_page import PRECISION_BEGIN, PRECISION_END, misses, section
from bench.precision_rows import OP, ChoiceRow, PrecisionRow, latest_rows, load_precision_rows
from bench.tables import replace_section

# Of the tokens that plans are judged on, so that no plan has seen them.
JUDGED_SEED = 1_000_000
DATA = {"spikes": {}, "rows": {"spike_features": 0}}
"""Layers as `realistic_layer` makes them, and without the spiking features of super experts."""


@dataclass(frozen=True)
class Setup:
    """What is the same for all seeds of a run."""

    case: Case
    data: str
    num_tokens: int = 2048
    super_experts: int = 3
    scales: str = "block"
    byte_budget: float = 0.03

    def shrunk(self) -> Setup:
        """Return a miniature that a CPU runs in a moment."""
        return replace(
            self, case=self.case.shrunk(), num_tokens=256, super_experts=1, byte_budget=0.15
        )


def exact_output(layer: RealisticLayer, tokens: Tokens) -> Tensor:
    """Return the layer's output in float32, with nothing rounded on the way."""
    hidden, weights, ids = tokens
    out = torch.zeros(hidden.shape)
    for expert in range(layer.w2.shape[0]):
        rows, columns = (ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden[rows].float() @ layer.w13[expert].float().T).chunk(2, dim=1)
        result = (functional.silu(gate) * up) @ layer.w2[expert].float().T
        out.index_add_(0, rows, result * weights[rows, columns, None])
    return out


def relative_error(out: Tensor, exact: Tensor) -> float:
    """Return the root of the noise's energy over the signal's."""
    difference = (out.double() - exact.double()).norm()
    return float(difference / exact.double().norm())


def measure(setup: Setup, seed: int, environment: Environment) -> PrecisionRow:
    """Return the row of one layer."""
    case = setup.case
    layer = realistic_layer(
        case.num_experts,
        case.hidden_size,
        case.intermediate_size,
        top_k=case.top_k,
        seed=seed,
        super_experts=setup.super_experts,
        **DATA[setup.data],
    )
    experts = layer.experts()
    begin = time.perf_counter()
    batch = tuple(layer.tokens(setup.num_tokens, seed=seed))
    stats = calibrate(experts, [batch], scales=setup.scales)
    calibrate_s = time.perf_counter() - begin
    planned = plan_precision(stats, byte_budget=setup.byte_budget)
    tokens = layer.tokens(setup.num_tokens, seed=JUDGED_SEED + seed)
    exact = exact_output(layer, tokens)
    plan = planned.plan.layer(0)
    errors = [
        relative_error(ExpertBank.from_experts(own, bf16=experts)(*tokens), exact)
        for own in (plan.with_fp8(), plan, plan.with_bf16())
    ]
    planted = set(layer.planted)
    chosen = [(choice.expert, choice.stage) for choice in planned.choices]
    return PrecisionRow(
        op=OP,
        case=case.name,
        data=setup.data,
        seed=seed,
        num_experts=case.num_experts,
        top_k=case.top_k,
        hidden_size=case.hidden_size,
        intermediate_size=case.intermediate_size,
        num_tokens=setup.num_tokens,
        super_experts=setup.super_experts,
        scales=setup.scales,
        byte_budget=setup.byte_budget,
        found_all=planted <= set(chosen),
        found_first=_come_first(planted, chosen),
        error_uniform_fp8=_rounded(errors[0]),
        error_planned=_rounded(errors[1]),
        error_bf16=_rounded(errors[2]),
        predicted_uniform_fp8=_rounded(planned.fp8_error),
        predicted_planned=_rounded(planned.error),
        gap=_rounded(planned.gap),
        fp8_bytes=planned.fp8_bytes,
        extra_bytes=planned.extra_bytes,
        output_max_over_median=_rounded(float(exact.abs().max() / exact.abs().median())),
        calibrate_s=round(calibrate_s, 1),
        choices=_choices(stats, planned, planted),
        device=environment.device_name,
        torch=torch.__version__,
        commit=environment.commit,
    )


def _come_first(planted: set[tuple[int, str]], chosen: list[tuple[int, str]]) -> bool:
    """Whether all planted stages are chosen, and before them none but of super experts."""
    if not planted <= set(chosen):
        return False
    last = max((chosen.index(place) for place in planted), default=-1)
    super_experts = {expert for expert, _ in planted}
    return all(expert in super_experts for expert, _ in chosen[:last])


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _choices(
    stats: PrecisionStats, planned: PlannedPrecision, planted: set[tuple[int, str]]
) -> tuple[ChoiceRow, ...]:
    (own,) = stats.layers.values()
    rows = []
    for choice in planned.choices:
        place = (choice.expert, 0 if choice.stage == "gate_up" else 1)
        rows.append(
            ChoiceRow(
                expert=choice.expert,
                stage=choice.stage,
                planted=(choice.expert, choice.stage) in planted,
                rows=int(own.rows[choice.expert]),
                snr_db=round(float(own.snr_db[place]), 2),
                worst=_rounded(float(own.worst[place])),
                output_max=_rounded(float(own.output_max[place])),
                kurtosis=_rounded(float(own.kurtosis[place])),
                max_over_rms=_rounded(float(own.max_over_rms[place])),
                extra_bytes=choice.extra_bytes,
                removed=_rounded(choice.removed),
            )
        )
    return tuple(rows)


def measure_all(
    setups: Sequence[Setup], seeds: Sequence[int], environment: Environment
) -> Iterator[PrecisionRow]:
    """Measure every seed of every setup."""
    for setup in setups:
        for seed in seeds:
            yield measure(setup, seed, environment)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of `bench.precision_plan`."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.precision_plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cases", default="qwen3-30b", help=f"of {', '.join(case_names())}, or several with ,")
    add("--data", default=",".join(DATA), help="of spikes, rows")
    add("--seeds", type=int, default=20, help="how many")
    add("--first-seed", type=int, default=0)
    add("--tokens", type=int, default=2048, help="to calibrate on, and as many to judge by")
    add("--budget", type=float, default=0.03, help="bytes beyond uniform FP8, as a share of it")
    add("--scales", default="block", help="block, channel or tensor")
    add("--out", type=Path, default=Path("precision.jsonl"), help="JSONL file, appended to")
    add("--read", type=Path, nargs="+", help="read these files and measure nothing")
    add("--markdown", type=Path, help="put the tables between the marks of this page")
    add("--check", action="store_true", help="fail if a bar is missed")
    add("--commit", default=None, help="revision for the rows; read from git by default")
    add("--dry-run", action="store_true", help="miniatures")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or read, and write the tables where they are asked for."""
    args = build_parser().parse_args(arguments)
    if args.read is not None:
        rows = [row for path in args.read for row in load_precision_rows(path)]
    else:
        rows = _measure_into(args)
    rows = latest_rows(rows)
    if args.markdown is not None:
        text = args.markdown.read_text()
        page = replace_section(text, section(rows), PRECISION_BEGIN, PRECISION_END)
        args.markdown.write_text(page)
    found = misses(rows)
    if args.check:
        print(*found, f"{len(rows)} rows, {len(found)} bars missed", sep="\n")
    return bool(args.check and found)


def _measure_into(args: argparse.Namespace) -> list[PrecisionRow]:
    environment = Environment.detect("cpu", args.commit)
    setups = [
        Setup(get_case(case), data, args.tokens, scales=args.scales, byte_budget=args.budget)
        for data in args.data.split(",")
        for case in args.cases.split(",")
    ]
    if args.dry_run:
        setups = [setup.shrunk() for setup in setups]
    rows = []
    with args.out.open("a") as file:
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        for row in measure_all(setups, seeds, environment):
            rows.append(row)
            file.write(row.to_json() + "\n")
            file.flush()
            print(
                f"{row.case} {row.data} seed {row.seed}: found {row.found_all}, FP8 "
                f"{row.error_uniform_fp8:.2e}, planned {row.error_planned:.2e}, BF16 "
                f"{row.error_bf16:.2e}, {row.extra_bytes / row.fp8_bytes:.2%} more bytes, "
                f"calibrated in {row.calibrate_s} s",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
