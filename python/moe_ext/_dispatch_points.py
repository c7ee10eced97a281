"""A table of measured choices that answers for the nearest measured problem.

What `bench/tune_tables.py` writes. Distances are in octaves: of rows a group, of rows and, with
less weight, of n and k. Between two measured row counts of a shape the nearer one decides, between
two shapes the one more alike.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from moe_ext._math import ceil_div

# Of squared octaves of n and k. With 0.3 to 1 the rows of pairs in bench/results/probes/pairs-*
# chose alike for a layer that was left out of them, with 2 and more worse.
_SHAPE_WEIGHT = 0.3
# As far as six octaves in one direction, beyond which the cost model decides.
_FARTHEST = 36.0


class Tuned(NamedTuple):
    """The choices for a GEMM of one shape, or for a layer by its first GEMM.

    Each is a number of rows, a kernel (of a layer two, joined by "+" unless one runs both GEMMs),
    and what was measured there.
    """

    name: str
    num_groups: int
    n: int
    k: int
    choices: tuple[tuple[int, str, str], ...]


def tuned(shape: tuple[str, int, int, int], *choices: tuple[int, str, str]) -> Tuned:
    """Make the choices of a shape, its name first, as tables are written."""
    return Tuned(*shape, choices)


class Nearest(NamedTuple):
    """The measured choice that answers for a problem."""

    kernel: str
    measurement: str
    tuned: Tuned
    num_rows: int
    where: str

    @property
    def reason(self) -> str:
        """Say what was measured, and for which problem."""
        shape = self.tuned
        return (
            f"{self.measurement}; measured with {self.num_rows} rows in {shape.num_groups} groups, "
            f"n {shape.n}, k {shape.k} ({shape.name}); {self.where}"
        )


class _Point(NamedTuple):
    """A choice with what its distances need that no problem changes, in octaves."""

    slope: float  # twice its rows less its groups: what choices come in order by
    rows: float
    rows_per_group: float
    shape: int
    tuned: Tuned
    position: int


_Line = tuple[float, float, _Point]
"""A choice's squared distance from a problem of some shape, but for 2 x^2, which all share, as a
function of x, the octaves of the problem's rows: rest - 2 x slope. Slope, rest and choice."""


class Points:
    """The measured choices for one kind of operands.

    `where` says where the rows are and what they were measured on. No choice is for a GPU with
    another number of SMs, or for fewer 64-row tiles of weights than `min_weight_tiles`: with far
    fewer than were measured a wide tile would leave most SMs idle.
    """

    def __init__(
        self,
        dtype: str,
        accumulate: str,
        *tuned: Tuned,
        where: str,
        sm_count: int = 132,
        min_weight_tiles: int = 400,
    ) -> None:
        """Keep what is given, in order; shapes are looked at when they are asked for."""
        self.dtype = dtype
        self.accumulate = accumulate
        self.tuned = tuned
        self.where = where
        self.sm_count = sm_count
        self.min_weight_tiles = min_weight_tiles
        self._points = sorted(_points_of(tuned), key=lambda point: point.slope)
        self._by_shape: dict[tuple[int, int, int], tuple[list[float], list[_Line]]] = {}

    def kernels(self) -> tuple[str, ...]:
        """List every kernel that a choice names, once."""
        return tuple(
            dict.fromkeys(
                name
                for shape in self.tuned
                for _, kernels, _ in shape.choices
                for name in kernels.split("+")
            )
        )

    def nearest(
        self, num_rows: int, num_groups: int, n: int, k: int, sm_count: int
    ) -> Nearest | None:
        """Return the choice nearest to a problem, None where nothing like it was measured."""
        if sm_count != self.sm_count or num_groups * ceil_div(n, 64) < self.min_weight_tiles:
            return None
        shape = (num_groups, n, k)
        known = self._by_shape.get(shape)
        if known is None:
            if len(self._by_shape) >= 1024:  # of a process that never repeats itself
                self._by_shape.clear()
            known = self._by_shape[shape] = self._along_rows(*shape)
        ends, lines = known
        if not lines:
            return None
        x = math.log2(max(num_rows, 1))
        slope, rest, point = lines[bisect.bisect_left(ends, x)]
        if 2 * x * (x - slope) + rest > _FARTHEST:
            return None
        rows, kernel, measurement = point.tuned.choices[point.position]
        return Nearest(kernel, measurement, point.tuned, rows, self.where)

    def _along_rows(self, num_groups: int, n: int, k: int) -> tuple[list[float], list[_Line]]:
        """Return the choices nearest to a shape in order of rows, and where each but the last ends.

        A distance is a parabola in x, the same for all but for a line: the nearest choices are the
        lower envelope of lines.
        """
        groups, along_n, along_k = (math.log2(max(size, 1)) for size in (num_groups, n, k))
        apart = [
            _SHAPE_WEIGHT * ((along_n - math.log2(own.n)) ** 2 + (along_k - math.log2(own.k)) ** 2)
            for own in self.tuned
        ]
        ends: list[float] = []
        kept: list[_Line] = []
        for point in self._points:
            slope = point.slope + groups
            rest = point.rows**2 + (point.rows_per_group + groups) ** 2 + apart[point.shape]
            if kept and slope == kept[-1][0]:
                if rest >= kept[-1][1]:
                    continue  # as far from everything, or farther
                kept.pop()
                if ends:
                    ends.pop()
            end = -math.inf
            while kept:
                end = (rest - kept[-1][1]) / (2 * (slope - kept[-1][0]))
                if not ends or end > ends[-1]:
                    break
                kept.pop()
                ends.pop()
            if kept:
                ends.append(end)
            kept.append((slope, rest, point))
        return ends, kept


def _points_of(shapes: Iterable[Tuned]) -> Iterator[_Point]:
    """Yield the points of shapes."""
    for number, shape in enumerate(shapes):
        groups = math.log2(shape.num_groups)
        for position, (num_rows, _, _) in enumerate(shape.choices):
            rows = math.log2(num_rows)
            yield _Point(2 * rows - groups, rows, rows - groups, number, shape, position)
