"""Which compiled kernel runs: pure functions of host numbers, never of device memory.

A measured table decides for the kinds of operands that have one, a cost model over tiles, waves and
bytes for the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from moe_ext._configs import GroupedGemmConfig, all_configs, config_indices, matching_configs
from moe_ext._dispatch_measured import Measured
from moe_ext._dispatch_rows import Row
from moe_ext._dispatch_table import TABLES, WHOLE_ROWS
from moe_ext._math import ceil_div

ITEM_BYTES = {"bf16": 2, "fp8": 1}

# Ceilings of one H200 (132 SMs, 700 W): docs/architecture.md says how they were measured.
READ_BYTES_PER_US = 4.5e6
DENSE_FLOPS_PER_US = {"bf16": 720e6, "fp8": 1350e6}
LAUNCH_US = 2.0
_CEILING_SMS = 132

# What one SM reads when its neighbours are idle: about 96 KiB in flight, 1.2 us there and back.
_SM_READ_BYTES_PER_US = 80e3
# Filling the ring and storing the tile, hidden only behind a second CTA on the same SM.
_TILE_OVERHEAD_US = 1.0
# Adding the tensor core's sums into fp32 registers every 128 of K; with scales per block under
# Swap-AB a multiplication more for each, because neighbouring columns have different ones.
_PROMOTION_SLOWDOWN = 1.1
_SWAPPED_BLOCK_SLOWDOWN = 1.4


class Problem(NamedTuple):
    """What the choice depends on.

    `accumulate` is "fp32" for bf16; "promoted", "fast", "block" (scales per block) or "shifted"
    (the same, the weights' beginning inside k) for fp8.
    """

    dtype: str
    accumulate: str
    num_rows: int
    num_groups: int
    n: int
    k: int
    sm_count: int


class Decision(NamedTuple):
    """The chosen kernel and why: `source` is "table" or "cost model"."""

    config: GroupedGemmConfig
    source: str
    reason: str


def expected_active_groups(num_rows: int, num_groups: int) -> int:
    """Groups that own a row when each row falls on any group with the same chance."""
    if num_rows <= 0:
        return 0
    return max(1, round(num_groups * (1.0 - (1.0 - 1.0 / num_groups) ** num_rows)))


def floor_us(dtype: str, num_rows: int, active_groups: int, n: int, k: int) -> float:
    """The least a GEMM can take: weights read once, or the dense rate, plus a launch."""
    read_us = active_groups * n * k * ITEM_BYTES[dtype] / READ_BYTES_PER_US
    return max(read_us, 2 * num_rows * n * k / DENSE_FLOPS_PER_US[dtype]) + LAUNCH_US


def predict_us(config: GroupedGemmConfig, problem: Problem, active_groups: int) -> float:
    """Estimate the time of `problem`, its rows spread evenly over `active_groups`."""
    least = floor_us(problem.dtype, problem.num_rows, active_groups, problem.n, problem.k)
    return max(least, LAUNCH_US + _busy_us(config, problem, active_groups))


def _busy_us(config: GroupedGemmConfig, problem: Problem, active_groups: int) -> float:
    """Estimate how long the busiest SM works."""
    if problem.num_rows <= 0 or problem.n <= 0:
        return 0.0
    share = ceil_div(problem.num_rows, active_groups)
    token_tiles = ceil_div(share, config.tile_tokens)
    width = config.tile_tokens
    if config.swapped:
        width = min(width, ceil_div(ceil_div(share, token_tiles), 8) * 8)
    tiles = active_groups * token_tiles * ceil_div(problem.n, config.tile_weights)
    tiles_per_sm = ceil_div(tiles * config.split_k, problem.sm_count)
    step_bytes = config.tile_k_bytes * config.split_k
    row_bytes = ceil_div(problem.k * ITEM_BYTES[problem.dtype], step_bytes) * config.tile_k_bytes

    # Under 64 columns WGMMA waits for its 64-row operand: reading that takes as long as 32 columns.
    columns = max(width, 32 + width // 2) if config.swapped else width
    flops_per_us = DENSE_FLOPS_PER_US[problem.dtype] / _CEILING_SMS
    math_us = 2.0 * config.tile_weights * columns * row_bytes / ITEM_BYTES[problem.dtype]
    math_us /= flops_per_us
    if problem.accumulate in ("promoted", "block"):
        swapped_block = problem.accumulate == "block" and config.swapped
        math_us *= _SWAPPED_BLOCK_SLOWDOWN if swapped_block else _PROMOTION_SLOWDOWN
    elif problem.accumulate == "shifted":  # everything is multiplied twice
        math_us *= 2 * _SWAPPED_BLOCK_SLOWDOWN
    load_us = (config.tile_weights + width) * row_bytes / _SM_READ_BYTES_PER_US
    return tiles_per_sm * (max(math_us, load_us) + _TILE_OVERHEAD_US / config.ctas_per_sm)


def _measured(
    problem: Problem, by_id: Mapping[str, GroupedGemmConfig], table: Measured | None
) -> Decision | None:
    """Return what the table chooses among the kernels in `by_id`."""
    if table is None:
        return None
    sizes = problem[2:]
    for row in WHOLE_ROWS.get(problem.accumulate, ()):
        if row.config in by_id and row.matches(*sizes):
            return Decision(by_id[row.config], "table", row.measurement)
    allowed = table.allowed(by_id)
    if not allowed:
        return None
    found = table.gemm(*sizes, allowed)
    source = "cost model" if found.nearest is None else "table"
    return Decision(by_id[found.choice], source, table.reason(found))


def decide(
    problem: Problem, configs: tuple[GroupedGemmConfig, ...], table: Measured | None
) -> Decision:
    """Choose among `configs`; they and the table fit the problem's dtype and accumulation."""
    return _decide(problem, {config.id: config for config in configs}, table)


def _decide(
    problem: Problem, by_id: Mapping[str, GroupedGemmConfig], table: Measured | None
) -> Decision:
    measured = _measured(problem, by_id, table)
    if measured is not None:
        return measured
    # Whole rows pay for few K only, which the model does not know: the table's to choose.
    configs = [config for config in by_id.values() if config.order != "SwapABRows"]
    active_groups = expected_active_groups(problem.num_rows, problem.num_groups)
    # Many kernels reach the floor when weights dominate; the least busy of them has most to spare.
    least = floor_us(problem.dtype, problem.num_rows, active_groups, problem.n, problem.k)
    busy = [_busy_us(config, problem, active_groups) for config in configs]
    costs = [(max(least, LAUNCH_US + busy_us), busy_us) for busy_us in busy]
    best = min(costs)
    reason = f"least of {len(configs)} estimates, {best[0]:.1f} us"
    return Decision(configs[costs.index(best)], "cost model", reason)


@functools.lru_cache(maxsize=64)
def _candidates(
    dtype: str, accumulate: str
) -> tuple[dict[str, GroupedGemmConfig], Measured | None]:
    configs = matching_configs(dtype, accumulate)
    if not configs:
        raise RuntimeError(
            f'moe_ext: a kernel for {dtype} operands with accumulate="{accumulate}" must be '
            "compiled, "
            f"got only {', '.join(config.id for config in all_configs())}"
        )
    return {config.id: config for config in configs}, TABLES.get((dtype, accumulate))


@functools.lru_cache(maxsize=4096)
def choose(
    *,
    dtype: str,
    accumulate: str,
    num_rows: int,
    num_groups: int,
    n: int,
    k: int,
    sm_count: int = _CEILING_SMS,
) -> Decision:
    """Choose a compiled kernel and say why; `accumulate` does not matter for bf16."""
    if dtype == "bf16":
        accumulate = "fp32"
    sums = accumulate.removesuffix("_swapped")
    problem = Problem(dtype, sums, num_rows, num_groups, n, k, sm_count)
    return _decide(problem, *_candidates(dtype, accumulate))


class _Finder(NamedTuple):
    """What finds a kernel's index in a measured table without telling why."""

    first: tuple[Row, ...]
    choose: Callable[..., tuple[int, float, int, bool]]
    indices: tuple[tuple[int, int], ...]  # of both GEMMs' kernels, by choice
    allowed: int


@functools.lru_cache(maxsize=64)
def _finder(dtype: str, accumulate: str) -> _Finder | None:
    by_id, table = _candidates(dtype, accumulate)
    if table is None or not table.allowed(by_id):
        return None
    first = tuple(row for row in WHOLE_ROWS.get(table.accumulate, ()) if row.config in by_id)
    known = config_indices()
    names = [choice.split("+") for choice in table.compiled]
    indices = tuple((known[own[0]], known[own[-1]]) for own in names)
    return _Finder(first, table.finder.choose_gemm, indices, table.allowed(by_id))


@functools.lru_cache(maxsize=4096)
def select(
    dtype: str,
    accumulate: str,
    num_rows: int,
    num_groups: int,
    n: int,
    k: int,
    sm_count: int = _CEILING_SMS,
) -> int:
    """Choose a compiled kernel's index: what the op asks for once per problem.

    What `choose` says, without the words: those take longer than the choice.
    """
    finder = _finder(dtype, "fp32" if dtype == "bf16" else accumulate)
    if finder is not None:
        for row in finder.first:
            if k <= row.max_k and row.matches(num_rows, num_groups, n, k, sm_count):
                return config_indices()[row.config]
        choice, _, _, second = finder.choose(num_rows, num_groups, n, k, sm_count, finder.allowed)
        return finder.indices[choice][second]
    return choose(
        dtype=dtype,
        accumulate=accumulate,
        num_rows=num_rows,
        num_groups=num_groups,
        n=n,
        k=k,
        sm_count=sm_count,
    ).config.index
