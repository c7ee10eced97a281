"""Which eager calls `bench.stability` makes, decided before anything is timed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from bench.cases import Case, get_case
from bench.data.routing import make_routing
from bench.floors import floor_us, layer_work_of


@dataclass(frozen=True)
class Setting:
    """What a pass over the calls depends on; goes to child processes as JSON."""

    provider: str
    case_name: str
    dtype: str
    scale: str  # "none" for BF16, or one of `bench.layer.LAYER_SCALES`
    routing: str
    num_calls: int
    max_tokens: int
    same_tokens: int | None  # the token count of every call; None gives each its own
    seed: int
    preload: bool
    dry_run: bool

    @property
    def case(self) -> Case:
        """The layer."""
        case = get_case(self.case_name)
        return case.shrunk() if self.dry_run else case

    def to_json(self) -> str:
        """Return the setting as one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Setting:
        """Read what `to_json` wrote."""
        return Setting(**json.loads(text))


@dataclass(frozen=True)
class PlannedCall:
    """One call: its routing, and the least it can take."""

    num_tokens: int
    ids: Tensor  # (num_tokens, top_k), int32
    weights: Tensor  # (num_tokens, top_k), float32
    rows_of_experts: tuple[int, ...]
    floor_us: float


class Tail(NamedTuple):
    """Percentiles by nearest rank: each is the time of a call, none an interpolation."""

    p50: float
    p99: float
    p999: float
    largest: float


def tail_of(values: Sequence[float]) -> Tail:
    """Return the percentiles of at least one value."""
    ordered = sorted(values)

    def rank(share: float) -> float:
        return ordered[math.ceil(share * len(ordered)) - 1]

    return Tail(rank(0.5), rank(0.99), rank(0.999), ordered[-1])


def token_counts(setting: Setting) -> list[int]:
    """Return the tokens of every call: all the same, or all different.

    Different ones are drawn from 1 to `max_tokens` with a chance of 1 / T, which makes doublings
    equally likely until the counts of one are used up, and come in random order.
    """
    if setting.same_tokens is not None:
        return [setting.same_tokens] * setting.num_calls
    if setting.num_calls > setting.max_tokens:
        raise ValueError(
            f"token_counts: `num_calls` must be at most `max_tokens` = {setting.max_tokens} for "
            f"token counts that all differ, got {setting.num_calls}"
        )
    every = np.arange(1, setting.max_tokens + 1)
    chances = 1 / every
    generator = np.random.Generator(np.random.PCG64(setting.seed))
    chosen = generator.choice(
        every, size=setting.num_calls, replace=False, p=chances / chances.sum()
    )
    # Without replacement the likeliest come first.
    return [int(count) for count in generator.permutation(chosen)]


def plan_calls(setting: Setting) -> list[PlannedCall]:
    """Draw the routing of every call, each with a seed of its own."""
    case = setting.case

    def plan(index: int, num_tokens: int) -> PlannedCall:
        ids, weights = make_routing(
            num_tokens, case.num_experts, case.top_k, setting.routing, setting.seed + index
        )
        rows = np.bincount(ids.numpy().reshape(-1), minlength=case.num_experts)
        work = layer_work_of(case, setting.dtype, num_tokens, float((rows > 0).sum()))
        least = floor_us(work, setting.dtype)
        return PlannedCall(num_tokens, ids, weights, tuple(map(int, rows)), least)

    counts = token_counts(setting)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(plan, range(len(counts)), counts))


def predicted_us(setting: Setting, call: PlannedCall) -> float:
    """Return what the dispatcher's cost model expects of both GEMMs; the layer's other kernels are
    not in it."""
    from moe_ext import explain

    offs = np.cumsum(call.rows_of_experts).tolist()
    shapes = (setting.case.stage_shape(stage) for stage in ("gate_up", "down"))
    return sum(
        explain(
            dtype=setting.dtype,
            num_rows=offs[-1],
            num_groups=setting.case.num_experts,
            n=n,
            k=k,
            block_scales=setting.scale == "block128",
            offs=offs,
        ).predicted_us
        for n, k in shapes
    )
