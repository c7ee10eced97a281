"""Timed cells as points of the dispatcher's tables: which kernel is to run there, and why.

A point is a problem as the dispatcher sees it. Timings of one problem under several routings or
scale layouts that the same kernels take are one point, each kernel by the geometric mean of its
time over the best's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bench.candidates import gated_sums, layer_of, stage_sums
from bench.contest import both_us
from bench.ops import GEMM, LAYER, PAIR
from bench.providers.base import kernels_of
from bench.rows import Row
from bench.tune_cells import cell_of

# Kernels within this share of the best are as good as it; of those the one that serves most of the
# problems with a like number of rows a group is taken, so that a table does not follow the noise.
TOLERANCE = 0.015
NEIGHBOUR_OCTAVES = 2.0
SWAPPED = "block_swapped"

TableKey = tuple[str, str, str]
"""Op ("gemm" or "layer"), dtype and dispatch's name of the way to sum."""
Shape = tuple[int, int, int]
"""num_groups, n, k."""


@dataclass(frozen=True)
class Visit:
    """One contest of kernels: its rows, which have times, and the file they are in."""

    rows: Sequence[Row]
    file: str


@dataclass(frozen=True)
class Problem:
    """A timed problem: a GEMM, the two of a pair, or a layer."""

    op: str
    dtype: str
    sums: tuple[str, ...]  # of each stage; of a layer its first GEMM's
    case: str
    num_tokens: int
    num_rows: int
    shapes: tuple[Shape, ...]  # of each stage; of a layer its first GEMM's
    stages: tuple[str, ...]
    visits: tuple[Visit, ...]

    @cached_property
    def ratios(self) -> dict[str, float]:
        """Time over the best's of each kernel, the mean over all visits that all timed it."""
        logs: dict[str, list[float]] = defaultdict(list)
        for visit in self.visits:
            best = min(map(both_us, visit.rows))
            for row in visit.rows:
                logs[row.config].append(math.log(both_us(row) / best))
        return {
            config: math.exp(sum(values) / len(values))
            for config, values in logs.items()
            if len(values) == len(self.visits)
        }

    @property
    def rows_per_group(self) -> float:
        """Rows of an average group."""
        return self.num_rows / self.shapes[0][0]

    def describe(self, config: str, ratio: float, num_candidates: int) -> str:
        """Return what was measured of a configuration, as tables have it."""
        times = sorted(
            both_us(row) for visit in self.visits for row in visit.rows if row.config == config
        )
        ends = dict.fromkeys(f"{us:.{0 if us >= 1000 else 1}f}" for us in (times[0], times[-1]))
        return f"T={self.num_tokens}: {'-'.join(ends)} us, {ratio:.2f}x of {num_candidates}"


@dataclass(frozen=True)
class Point:
    """What a table says of one problem."""

    table: TableKey
    shape: Shape
    num_rows: int
    name: str
    kernel: str
    measurement: str
    ratio: float  # of the time of the kernels that were chosen to the best's
    problem: Problem


def problems_of(visits: Iterable[Visit]) -> list[Problem]:
    """Group visits by the problem that the dispatcher sees, in the order of the visits."""
    grouped: dict[tuple[object, ...], list[Visit]] = defaultdict(list)
    facts: dict[tuple[object, ...], Problem] = {}
    for visit in visits:
        problem = _problem_of(visit)
        key = (problem.op, problem.dtype, problem.sums, problem.shapes, problem.num_rows)
        grouped[key].append(visit)
        facts.setdefault(key, problem)
    return [replace(facts[key], visits=tuple(same)) for key, same in grouped.items()]


def _problem_of(visit: Visit) -> Problem:
    row = visit.rows[0]
    cell, variant = cell_of(row)
    is_layer = cell.op == LAYER
    stages = cell.stages[:1] if is_layer else cell.stages
    sums = [_layer_sums(row)] if is_layer else stage_sums(cell, variant)
    case = cell.case
    return Problem(
        op=row.op,
        dtype=row.dtype,
        sums=tuple(sums),
        case=case.name,
        num_tokens=row.num_tokens,
        num_rows=cell.num_rows,
        shapes=tuple((case.num_experts, *case.stage_shape(stage)) for stage in stages),
        stages=stages,
        visits=(visit,),
    )


def _layer_sums(row: Row) -> str:
    from moe_ext._fused_moe_kernels import takes_plain

    cell, variant = cell_of(row)
    sums = gated_sums(variant)
    plain = sums != "block" or takes_plain(layer_of(cell, variant), bias=False)
    return sums if plain else SWAPPED


def _is_swapped(problem: Problem, config: str) -> bool:
    """Whether a configuration serves blocks that plain order does not take; the second GEMM of a
    layer takes them all."""
    from moe_ext._configs import all_configs, config_indices

    kernels = kernels_of(config, len(problem.stages))
    kernels = kernels[:1] if problem.op == LAYER else kernels
    return all(all_configs()[config_indices()[name]].swapped for name in kernels)


Ratios = Mapping[str, float]


def choose_labels(
    problems: Sequence[Problem], ratios: Sequence[Ratios], tolerance: float
) -> list[str]:
    """Return the configuration of each problem: of those within `tolerance` of its best the one
    that is so for most of its neighbours, then the fastest."""
    good = [
        {config for config, ratio in own.items() if ratio <= (1 + tolerance) * min(own.values())}
        for own in ratios
    ]
    octaves = [math.log2(problem.rows_per_group) for problem in problems]
    labels = []
    for number, own in enumerate(ratios):
        near = [
            other
            for other, octave in enumerate(octaves)
            if abs(octave - octaves[number]) <= NEIGHBOUR_OCTAVES
        ]

        def rank(config: str, near: list[int] = near, own: Ratios = own) -> tuple[int, float, str]:
            return -sum(config in good[other] for other in near), own[config], config

        labels.append(min(good[number], key=rank))
    return labels


def points_of(problems: Sequence[Problem], tolerance: float = TOLERANCE) -> list[Point]:
    """Return the points of all tables; GEMMs timed alone speak for shapes that no pair has."""
    families: dict[tuple[object, ...], list[Problem]] = defaultdict(list)
    for problem in sorted(problems, key=lambda problem: problem.op == GEMM):
        families[problem.op == LAYER, problem.op, problem.dtype, problem.sums].append(problem)
    points: dict[tuple[TableKey, Shape, int], Point] = {}
    of_pairs: set[tuple[TableKey, Shape]] = set()
    for family in families.values():
        for point in _points_of_family(family, tolerance):
            where = (point.table, point.shape)
            if point.problem.op == PAIR:
                of_pairs.add(where)
            if point.problem.op != GEMM or where not in of_pairs:
                points.setdefault((*where, point.num_rows), point)
    return list(points.values())


def _points_of_family(family: Sequence[Problem], tolerance: float) -> Iterable[Point]:
    """Yield the points of problems of one op and one kind of operands.

    Kernels of plain order do not take all blocks: where they took part there is a second point, for
    blocks that only the others take.
    """
    first = family[0]
    yield from _points(family, lambda problem, config: True, tolerance, first.sums)
    if "block" in first.sums and SWAPPED not in first.sums:
        yield from _points(family, _is_swapped, tolerance, (SWAPPED,) * len(first.sums))


def _points(
    family: Sequence[Problem],
    takes: Callable[[Problem, str], bool],
    tolerance: float,
    sums: Sequence[str],
) -> Iterable[Point]:
    ratios = [
        {config: ratio for config, ratio in problem.ratios.items() if takes(problem, config)}
        for problem in family
    ]
    kept = [(problem, own) for problem, own in zip(family, ratios, strict=True) if own]
    problems = [problem for problem, _ in kept]
    labels = choose_labels(problems, [own for _, own in kept], tolerance)
    for (problem, own), label in zip(kept, labels, strict=True):
        ratio = own[label] / min(own.values())
        measurement = problem.describe(label, ratio, len(own))
        is_layer = problem.op == LAYER
        by_stage = [label] if is_layer else kernels_of(label, len(problem.stages))
        for shape, stage, how, kernel in zip(
            problem.shapes, problem.stages, sums, by_stage, strict=True
        ):
            key = ("layer" if is_layer else "gemm", problem.dtype, how)
            name = problem.case if is_layer else f"{problem.case} {stage}"
            yield Point(key, shape, problem.num_rows, name, kernel, measurement, ratio, problem)
