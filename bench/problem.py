"""What one cell of the grid works on: a plan on host numbers, then tensors carved from one pool."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.cases import Case
from bench.draws import Counts
from bench.floors import (
    ELEMENT_BYTES,
    OUT_BYTES,
    Work,
    floor_us,
    is_compute_heavy,
    layer_work_of,
    work_of,
)
from bench.layouts import BUFFER_STEP, CONTIGUOUS, MASKED, MAX_BUFFER_BYTES
from bench.ops import LAYER, PAIR
from bench.timing import TimingPolicy

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
# FP8 values are drawn with this deviation, so 448 is 7 deviations away; BF16 ones with 1/2.
FP8_DEVIATION = 64.0
BF16_DEVIATION = 0.5
# An odd number of elements: no two experts of a case lie a whole number of templates apart.
TEMPLATE_ELEMENTS = (1 << 26) - 59
ALIGNMENT = 1024


@dataclass(frozen=True)
class Cell:
    """One point of the grid: everything but the provider and its variant."""

    case: Case
    stages: tuple[str, ...]
    num_tokens: int
    dtype: str
    routing: str
    layout: str = CONTIGUOUS
    op: str = PAIR

    @property
    def num_rows(self) -> int:
        """Rows of every GEMM: tokens times top-k."""
        return self.num_tokens * self.case.top_k

    def work(self, active_experts: float) -> Work:
        """Return the work of one call that hits this many experts."""
        if self.op == LAYER:
            return layer_work_of(self.case, self.dtype, self.num_tokens, active_experts)
        return work_of(self.case, self.stages, self.dtype, self.num_tokens, active_experts)


@dataclass(frozen=True)
class Plan:
    """How often a cell is repeated in a graph, and with which draws. Call i uses copy i % copies
    and draw i % len(counts)."""

    cell: Cell
    counts: Counts
    copies: int
    calls: int

    @property
    def active_experts(self) -> float:
        """Experts that are hit, averaged over the calls of the graph."""
        return float((self._counts_of_calls() > 0).sum(axis=1).mean())

    @property
    def max_rows(self) -> int:
        """Rows of the largest group in any call of the graph."""
        return int(self._counts_of_calls().max())

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Dimensions of the activations before the last: (num_rows,), or masked (num_experts,
        rows of a buffer). A buffer holds the largest group of any draw."""
        if self.cell.layout != MASKED:
            return (self.cell.num_rows,)
        steps = -(-int(self.counts.max()) // BUFFER_STEP)
        return (self.cell.case.num_experts, steps * BUFFER_STEP)

    @property
    def expected_rows(self) -> int:
        """Rows of an average group: what the caller of a masked GEMM knows on the host."""
        return max(1, round(self.cell.num_rows / self.cell.case.num_experts))

    @property
    def begins(self) -> Counts:
        """First row of each group in call 0, counted over `row_shape`."""
        if self.cell.layout != MASKED:
            begins: Counts = np.cumsum(self.counts[0]) - self.counts[0]
            return begins
        num_experts, buffer_rows = self.row_shape
        return np.arange(num_experts, dtype=np.int64) * buffer_rows

    @property
    def skipped_reason(self) -> str:
        """Why the cell is too large to measure; empty when it is not."""
        if self.cell.layout != MASKED:
            return ""
        element = ELEMENT_BYTES[self.cell.dtype]
        shapes = [self.cell.case.stage_shape(stage) for stage in self.cell.stages]
        size = sum(math.prod(self.row_shape) * (k * element + n * OUT_BYTES) for n, k in shapes)
        if size <= MAX_BUFFER_BYTES:
            return ""
        return (
            f"masked buffers of {self.row_shape[1]} rows take {size / 2**30:.0f} GiB, over "
            f"{MAX_BUFFER_BYTES / 2**30:.0f}"
        )

    @property
    def work(self) -> Work:
        """Work of one call, averaged over the calls of the graph."""
        return self.cell.work(self.active_experts)

    @property
    def compute_heavy(self) -> bool:
        """Whether the cell can reach the card's power limit."""
        return is_compute_heavy(self.work, self.cell.dtype)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all weight copies and activations of the cell."""
        return sum(size for _, size in self.blocks())

    def blocks(self) -> list[tuple[tuple[int, ...], int]]:
        """Return shape and padded bytes of each tensor in the pool: per stage the activations,
        which a whole layer makes itself, then the copies."""
        case, element = self.cell.case, ELEMENT_BYTES[self.cell.dtype]
        shapes: list[tuple[int, ...]] = []
        for stage in self.cell.stages:
            n, k = case.stage_shape(stage)
            if self.cell.op != LAYER:
                shapes.append((*self.row_shape, k))
            shapes.extend([(case.num_experts, n, k)] * self.copies)
        return [(s, _padded(math.prod(s) * element)) for s in shapes]

    def _counts_of_calls(self) -> Counts:
        used: Counts = self.counts[np.arange(self.calls) % len(self.counts)]
        return used


def make_plan(cell: Cell, counts: Counts, policy: TimingPolicy) -> Plan:
    """Decide copies and calls of a cell from its draws: (num_draws, num_experts) counts."""
    active = float((counts > 0).sum(axis=1).mean())
    work = cell.work(active)
    copies = policy.num_copies(work.weight_bytes)
    return Plan(cell, counts, copies, policy.num_calls(floor_us(work, cell.dtype), copies))


class MemoryPool:
    """One allocation of random values of one dtype, from which the cells carve views.

    Filling tens of gigabytes once instead of once per cell is what lets a full grid fit in
    minutes. Views are only read, so cells may overlap.
    """

    def __init__(self, num_bytes: int, dtype: str, device: torch.device) -> None:
        """Allocate and fill with Gaussian values; zeros would run faster and hide errors."""
        self.dtype = dtype
        self.values = torch.empty(
            num_bytes // ELEMENT_BYTES[dtype], dtype=TORCH_DTYPES[dtype], device=device
        )
        generator = torch.Generator(device=device).manual_seed(0)
        size = min(TEMPLATE_ELEMENTS, self.values.numel())
        template = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
        template *= BF16_DEVIATION if dtype == "bf16" else FP8_DEVIATION
        limit = 448.0 if dtype == "fp8" else 16.0
        drawn = template.clamp_(-limit, limit).to(self.values.dtype)
        for begin in range(0, self.values.numel(), size):
            part = self.values[begin : begin + size]
            part.copy_(drawn[: part.numel()])


@dataclass(frozen=True)
class StageInputs:
    """Tensors of one GEMM."""

    name: str
    a: Tensor  # (num_rows, k), or masked (num_experts, rows of a buffer, k)
    b: list[Tensor]  # copies of (num_experts, n, k)
    out: Tensor  # like `a` with n, bfloat16; for providers that write into a given tensor


@dataclass(frozen=True)
class Problem:
    """Tensors of one cell."""

    plan: Plan
    stages: list[StageInputs]
    # draws of (num_experts,) int32: end row of each expert, or masked its number of rows
    offs: list[Tensor]

    def poison(self) -> None:
        """Fill the outputs with NaN, so that an unwritten row shows."""
        for stage in self.stages:
            stage.out.fill_(math.nan)


def carve(plan: Plan, pool: MemoryPool) -> list[list[Tensor]]:
    """Return the tensors of `Plan.blocks` as views of the pool, one list per stage."""
    views = []
    begin = 0
    for shape, num_bytes in plan.blocks():
        views.append(pool.values[begin : begin + math.prod(shape)].view(shape))
        begin += num_bytes // ELEMENT_BYTES[plan.cell.dtype]
    per_stage = len(views) // len(plan.cell.stages)
    return [views[i : i + per_stage] for i in range(0, len(views), per_stage)]


def make_problem(plan: Plan, pool: MemoryPool, out_buffers: list[Tensor]) -> Problem:
    """Carve the tensors of a cell from the pool.

    Args:
        plan: The cell and its repetitions.
        pool: At least `plan.pool_bytes` of the cell's dtype.
        out_buffers: One flat bfloat16 buffer per stage, as `bench.measure.make_out_buffers`.
    """
    cell = plan.cell
    device = pool.values.device
    stages = []
    for index, (name, own) in enumerate(zip(cell.stages, carve(plan, pool), strict=True)):
        n, _ = cell.case.stage_shape(name)
        shape = (*plan.row_shape, n)
        out = out_buffers[index][: math.prod(shape)].view(shape)
        stages.append(StageInputs(name, own[0], own[1:], out))
    rows = plan.counts if cell.layout == MASKED else np.cumsum(plan.counts, axis=1)
    offs = torch.from_numpy(rows.astype(np.int32)).to(device)
    return Problem(plan, stages, list(offs.unbind()))


def _padded(num_bytes: int) -> int:
    return (num_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
