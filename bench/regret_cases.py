"""Problems that the tuner does not see: layers, ranks and token counts of their own, by number.

Case i depends on the seed and i alone. Kinds of operands go round, then the skews, so that any 42
cases in a row hold every pair of them once. Sizes are those of a model under tensor and expert
parallelism, or of no model at all; token counts have every doubling as likely as the next.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from bench.cases import (
    MODEL_SHAPES,
    ROUTINGS,
    STAGES,
    TOKENS,
    Case,
    get_case,
    name_of_sizes,
    tuned_case_names,
)
from bench.floors import ELEMENT_BYTES, OUT_BYTES, floor_us
from bench.layer import LAYER_SCALES
from bench.ops import LAYER, PAIR
from bench.problem import Cell
from bench.providers.base import Variant
from bench.scales import BLOCK, SCALES
from bench.timing import TimingPolicy

SEED = 20261201
KINDS: tuple[tuple[str, Variant], ...] = (
    (PAIR, Variant("bf16", "none", "fp32")),
    *((PAIR, Variant("fp8", scale, "promoted")) for scale in SCALES),
    (PAIR, Variant("fp8", "tensor", "fast")),
    (LAYER, Variant("bf16", "none", "fp32")),
    *((LAYER, Variant("fp8", scale, "promoted")) for scale in LAYER_SCALES),
    (LAYER, Variant("fp8", "tensor", "fast")),
)
NUM_CASES = 8 * len(KINDS) * len(ROUTINGS)
# Tensor- and expert-parallel degrees, sixteen GPUs at most.
DEGREES = tuple((t, e) for t in (1, 2, 4, 8) for e in (1, 2, 4, 8, 16) if t * e <= 16)
MOST_TOKENS = 8192
OF_NO_MODEL = 0.3  # this share of the cases
ROW_BYTES = 16  # a multiple of which contiguous rows have to be
# So that weights fit, twice and as often as it takes for them to be cold, and time suffices.
MOST_POOL_BYTES = 40 * 2**30
MOST_FLOOR_US = 2500.0


@dataclass(frozen=True)
class HeldOut:
    """One problem of the report."""

    number: int
    cell: Cell
    variant: Variant


def held_out(number: int, seed: int = SEED) -> HeldOut:
    """Return case `number`."""
    op, variant = KINDS[number % len(KINDS)]
    routing = ROUTINGS[number // len(KINDS) % len(ROUTINGS)]
    generator = np.random.Generator(np.random.PCG64([seed, number]))
    while True:
        case = draw_case(generator)
        tokens = int(2 ** generator.uniform(0, math.log2(MOST_TOKENS)))
        cell = Cell(case, STAGES, tokens, variant.dtype, routing, op=op)
        new = sizes_of(case) not in tuned_sizes() and tokens not in TOKENS
        if new and fits(cell, variant):
            return HeldOut(number, cell, variant)


def sizes_of(case: Case) -> tuple[int, int, int]:
    """Return experts, hidden and intermediate size."""
    return case.num_experts, case.hidden_size, case.intermediate_size


@cache
def tuned_sizes() -> frozenset[tuple[int, int, int]]:
    """Return the sizes that the tuner sees."""
    return frozenset(sizes_of(get_case(name)) for name in tuned_case_names())


@cache
def _models() -> list[Case]:
    with MODEL_SHAPES.open(newline="") as file:
        sizes = ("num_experts", "top_k", "hidden_size", "intermediate_size")
        return [
            Case("", row["model"], *(int(row[size]) for size in sizes))
            for row in csv.DictReader(file)
        ]


def draw_case(generator: np.random.Generator) -> Case:
    """Draw a rank of a model, or sizes out of the blue."""

    def between(least: int, most: int) -> int:
        return round(float(least * (most / least) ** generator.random()))

    if generator.random() < OF_NO_MODEL:
        model = "none"
        experts, top_k = between(8, 512), between(1, 12)
        hidden, intermediate = 64 * between(12, 128), 16 * between(6, 320)
    else:
        whole = _models()[generator.integers(len(_models()))]
        tensor, expert = DEGREES[generator.integers(len(DEGREES))]
        model, top_k, hidden = whole.model, whole.top_k, whole.hidden_size
        experts = max(1, whole.num_experts // expert)
        intermediate = whole.intermediate_size // tensor
    top_k = min(top_k, experts)
    name = name_of_sizes(experts, hidden, intermediate, top_k)
    return Case(name, model, experts, top_k, hidden, intermediate)


def _has_blocks(cell: Cell, variant: Variant) -> bool:
    """Whether scales per block of activations alone are so: one block is a scale for each row."""
    shapes = map(cell.case.stage_shape, cell.stages)
    return variant.scale != "block128_x_tensor" or min(k for _, k in shapes) > BLOCK


def fits(cell: Cell, variant: Variant) -> bool:
    """Whether a cell is within the limits of operands, memory and time."""
    if not _has_blocks(cell, variant):
        return False
    case, element = cell.case, ELEMENT_BYTES[cell.dtype]
    if any(size * element % ROW_BYTES for size in (case.hidden_size, case.intermediate_size)):
        return False
    active = min(case.num_experts, cell.num_rows)
    slow = floor_us(cell.work(active), cell.dtype) > MOST_FLOOR_US
    return not slow and pool_bound(cell) <= MOST_POOL_BYTES


def pool_bound(cell: Cell, policy: TimingPolicy | None = None) -> int:
    """Return bytes that weights and activations of a cell do not exceed, whatever is drawn: a call
    hits at least the experts of one token."""
    case, element = cell.case, ELEMENT_BYTES[cell.dtype]
    of_expert = sum(math.prod(case.stage_shape(stage)) for stage in cell.stages) * element
    copies = (policy or TimingPolicy()).num_copies(case.top_k * of_expert)
    activations = cell.num_rows * sum(
        n * OUT_BYTES + k * element for n, k in map(case.stage_shape, cell.stages)
    )
    padding = 2**20
    return copies * case.num_experts * of_expert + activations + padding
