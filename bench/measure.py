"""Cells of the grid and their measurement: check once, then time. Shared by `run` and `tune`."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.cases import Case
from bench.checks import MAX_ERROR, MAX_ERROR_FAST, max_error
from bench.draws import draw_all, draw_key
from bench.floors import floor_us, traffic_floor_us
from bench.layer import LayerProblem
from bench.layer_checks import MAX_LAYER_ERROR, max_layer_error
from bench.layouts import CONTIGUOUS
from bench.ops import GEMM, LAYER, stage_sets
from bench.problem import Cell, MemoryPool, Plan, Problem, make_plan
from bench.providers.base import P, Provider, Variant
from bench.providers.deep_gemm import DeepGemm
from bench.providers.moe_ext import MoeExt
from bench.providers.moe_ext_layer import MoeExtLayer
from bench.providers.torch_grouped_mm import TorchGroupedMM
from bench.providers.torch_layer import TorchLayer
from bench.rows import Row
from bench.timing import Timing, TimingPolicy, time_cuda, time_host, time_wall

PROVIDERS: dict[str, type[Provider[Problem]]] = {
    "moe_ext": MoeExt,
    "torch": TorchGroupedMM,
    "deep_gemm": DeepGemm,
}
LAYER_PROVIDERS: dict[str, type[Provider[LayerProblem]]] = {
    "moe_ext": MoeExtLayer,
    "torch": TorchLayer,
}
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Environment:
    """Columns that are the same in every row of a run."""

    device: torch.device
    device_name: str
    commit: str
    sm_count: int | None = None

    @staticmethod
    def detect(device: str, commit: str | None) -> Environment:
        """Read the names; `commit` overrides what git says, for trees without git."""
        target = torch.device(device)
        name, sm_count = "cpu", None
        if target.type == "cuda":
            properties = torch.cuda.get_device_properties(target)
            name, sm_count = properties.name, properties.multi_processor_count
        return Environment(target, name, commit or _git_commit(), sm_count)

    def synchronize(self) -> None:
        """Wait for the device and surface its errors."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _git_commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def make_plans(
    op: str,
    cases: Sequence[Case],
    tokens: Sequence[int],
    dtypes: Sequence[str],
    routings: Sequence[str],
    policy: TimingPolicy,
    layout: str = CONTIGUOUS,
) -> list[Plan]:
    """Draw all routings and plan every cell; dtype outermost, as the pool is filled per dtype."""
    cells = [
        Cell(case, stages, num_tokens, dtype, routing, layout, op)
        for dtype in dtypes
        for case in cases
        for routing in routings
        for num_tokens in tokens
        for stages in stage_sets(op)
    ]
    keys = [draw_key(cell.case, cell.num_tokens, cell.routing) for cell in cells]
    draws = draw_all(keys)
    return [make_plan(cell, draws[key], policy) for cell, key in zip(cells, keys, strict=True)]


def make_pool(plans: Sequence[Plan], dtype: str, device: torch.device) -> MemoryPool:
    """Allocate the pool that holds the largest cell of a dtype."""
    return MemoryPool(
        max(plan.pool_bytes for plan in plans if plan.cell.dtype == dtype), dtype, device
    )


def make_out_buffers(plans: Sequence[Plan], device: torch.device) -> list[Tensor]:
    """Allocate one flat output per stage, large enough for every cell."""
    positions = max((len(plan.cell.stages) for plan in plans), default=0)
    return [
        torch.empty(
            max(
                math.prod(plan.row_shape)
                * plan.cell.case.stage_shape(plan.cell.stages[position])[0]
                for plan in plans
                if position < len(plan.cell.stages)
            ),
            dtype=torch.bfloat16,
            device=device,
        )
        for position in range(positions)
    ]


Judge = Callable[[Any, Variant, Sequence[Tensor]], tuple[float, float]]
"""Returns the error of call 0's outputs and the largest that is timed."""


@dataclass(frozen=True)
class Outcome:
    """What happened to one variant on one cell."""

    timing: Timing | None
    error: float | None
    skipped_reason: str
    host_us: float | None = None


def measure(
    provider: Provider[P],
    variant: Variant,
    problem: P,
    policy: TimingPolicy,
    environment: Environment,
    *,
    give_up_us: float = math.inf,
    stop_us: float = math.inf,
    judge: Judge | None = None,
) -> Row:
    """Check one variant on one cell, time it if it is right, and return the row.

    `judge` stands in for the comparison with a reference, `give_up_us` and `stop_us` are those of
    `bench.timing.time_cuda`.
    """
    outcome = _check_and_time(
        provider, variant, problem, policy, environment, give_up_us, stop_us, judge or judge_error
    )
    config = provider.config_name(problem, variant)
    return _row(provider, variant, problem.plan, config, outcome, policy, environment)


def skip(
    provider: Provider[Any],
    variant: Variant,
    plan: Plan,
    policy: TimingPolicy,
    environment: Environment,
) -> Row:
    """Return the row of a cell that is too large to measure."""
    outcome = Outcome(None, None, plan.skipped_reason)
    return _row(provider, variant, plan, "", outcome, policy, environment)


def _row(
    provider: Provider[Any],
    variant: Variant,
    plan: Plan,
    config: str,
    outcome: Outcome,
    policy: TimingPolicy,
    environment: Environment,
) -> Row:
    timing, cell, work = outcome.timing, plan.cell, plan.work
    floor = floor_us(work, cell.dtype)
    moved = work.weight_bytes + work.activation_bytes
    return Row(
        op=cell.op,
        stage=cell.stages[0] if cell.op == GEMM else "",
        case=cell.case.name,
        provider=provider.name,
        dtype=variant.dtype,
        scale=variant.scale,
        accumulate=variant.accumulate,
        routing=cell.routing,
        num_tokens=cell.num_tokens,
        active_experts=round(plan.active_experts, 2),
        max_rows=plan.max_rows,
        config=config,
        median_us=round(timing.median_us, 3) if timing else None,
        p10_us=round(timing.p10_us, 3) if timing else None,
        p90_us=round(timing.p90_us, 3) if timing else None,
        floor_us=round(floor, 3),
        ratio_to_floor=round(timing.median_us / floor, 4) if timing else None,
        traffic_floor_us=round(traffic_floor_us(work, cell.dtype), 3),
        tflops=round(work.operations / timing.median_us / 1e6, 2) if timing else None,
        gbps=round(moved / timing.median_us / 1e3, 1) if timing else None,
        max_err=_finite(outcome.error),
        num_samples=timing.num_samples if timing else 0,
        skipped_reason=outcome.skipped_reason,
        device=environment.device_name,
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        commit=environment.commit,
        power=policy.power.regime,
        layout=cell.layout,
        batch_invariant=variant.batch_invariant,
        host_us=round(outcome.host_us, 2) if outcome.host_us is not None else None,
        sm_mhz=round(timing.sm_mhz, 1) if timing and timing.sm_mhz is not None else None,
        sm_count=environment.sm_count,
    )


def _finite(error: float | None) -> float | None:
    """Round an error; None for infinity, which JSON cannot hold and `skipped_reason` tells."""
    return None if error is None or not math.isfinite(error) else float(f"{error:.3e}")


def _check_and_time(
    provider: Provider[P],
    variant: Variant,
    problem: P,
    policy: TimingPolicy,
    environment: Environment,
    give_up_us: float,
    stop_us: float,
    judge: Judge,
) -> Outcome:
    error = host_us = None
    try:
        call = provider.prepare(problem, variant)
        problem.poison()
        error, limit = judge(problem, variant, provider.unpack(problem, call(0)))
        if not error <= limit:
            return Outcome(None, error, f"wrong result: max_err {error:.3g} > {limit}")
        if environment.device.type == "cuda":
            timing = time_cuda(
                call,
                problem.plan.calls,
                policy,
                compute_heavy=problem.plan.compute_heavy,
                give_up_us=give_up_us,
                stop_us=stop_us,
            )
            if problem.plan.cell.op == LAYER and variant.config is None:
                host_us = time_host(call)
        else:
            timing = time_wall(call, problem.plan.calls, policy)
    except (RuntimeError, ValueError) as failure:
        # A broken CUDA context raises again here and ends the run: nothing after it would be true.
        environment.synchronize()
        reason = str(failure).strip().splitlines() or [""]
        return Outcome(None, error, f"{type(failure).__name__}: {reason[0][:120]}")
    return Outcome(timing, error, "", host_us)


def judge_error(
    problem: Problem | LayerProblem, variant: Variant, outputs: Sequence[Tensor]
) -> tuple[float, float]:
    """Compare with the reference."""
    fast = variant.accumulate == "fast"
    if isinstance(problem, LayerProblem):
        error = max_layer_error(problem, variant.scale, outputs[0])
        return error, MAX_ERROR_FAST if fast else MAX_LAYER_ERROR
    return max_error(problem, variant.scale, outputs), MAX_ERROR_FAST if fast else MAX_ERROR
