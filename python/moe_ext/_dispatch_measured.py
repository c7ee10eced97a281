"""A table of measured problems, and what each kernel needs: what `bench/tune_tables.py` writes.

A choice is the least of the kernels' estimated times (csrc/grouped_gemm/estimate.hpp), each times
how far the estimates were off on measured problems like the one at hand
(csrc/grouped_gemm/measured_choices.hpp). Both GEMMs of a layer are looked at, so that either gets
the same kernel: two different ones in a row cost more than the better saves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from moe_ext._configs import config_indices, planner

if TYPE_CHECKING:
    from moe_ext._planner import MeasuredChoices

# In octaves of a problem's sizes: as far away as one that was measured has a say. And what the
# estimate weighs against them: one that is the same weighs ten, one an octave away 0.5.
# `tune_tables --leave-one-out` compares others.
RADIUS = 1.5
SHRINK = 1.0

Costs = tuple[float, ...]
"""Of a kernel: launch, then what it needs of each term that estimate.hpp names."""


class MeasuredProblem(NamedTuple):
    """Both GEMMs of a layer with so many rows, and the time of every choice, NaN if not timed."""

    num_groups: int
    hidden_size: int
    intermediate_size: int
    num_rows: int
    times_us: tuple[float, ...]

    @property
    def name(self) -> str:
        """Say what was measured."""
        sizes = f"{self.num_groups}x{self.hidden_size}x{self.intermediate_size}"
        return f"{sizes} with {self.num_rows} rows"


class Found(NamedTuple):
    """The best choice, its estimate, and what it rests on, None where nothing like it was timed."""

    choice: str
    us: float
    nearest: MeasuredProblem | None


class Measured:
    """The measured choices for one kind of operands.

    A choice names a kernel for both GEMMs of a layer, or two, joined by "+". `costs` are of each
    kernel that is named, `common` of what else is in a layer, and of two different kernels.
    `problems` are numbers: groups, hidden size, intermediate size, rows, microseconds of the best
    choice, and for each choice the thousandths that it took longer, "-" if it was not timed, "-7"
    for seven that were not.
    `where` says where the rows are and what they were measured on: a GPU with that many SMs.
    """

    def __init__(
        self,
        dtype: str,
        accumulate: str,
        *,
        choices: tuple[str, ...],
        costs: Mapping[str, Costs],
        common: tuple[float, float, float] = (0.0, 0.0, 0.0),
        problems: str,
        where: str,
        sm_count: int = 132,
        radius: float = RADIUS,
        shrink: float = SHRINK,
    ) -> None:
        """Keep what is given; it is looked at when it is first asked for."""
        self.dtype = dtype
        self.accumulate = accumulate
        self.choices = choices
        self.costs = costs
        self.common = common
        self.where = where
        self.sm_count = sm_count
        self._text = problems
        self._limits = radius, shrink

    def kernels(self) -> tuple[str, ...]:
        """List every kernel that a choice names, once."""
        return tuple(dict.fromkeys(name for choice in self.choices for name in choice.split("+")))

    @functools.cached_property
    def problems(self) -> tuple[MeasuredProblem, ...]:
        """Read the measured problems."""
        words = [one for word in self._text.split() for one in _words(word)]
        length = 5 + len(self.choices)
        return tuple(
            _problem(words[begin : begin + length]) for begin in range(0, len(words), length)
        )

    @functools.cached_property
    def compiled(self) -> tuple[str, ...]:
        """List the choices whose kernels are all compiled: the ones there are."""
        known = config_indices()
        return tuple(c for c in self.choices if all(name in known for name in c.split("+")))

    @functools.cached_property
    def finder(self) -> MeasuredChoices:
        """Make what finds the best of `compiled`."""
        choices, costs, problems = self._parts()
        return planner().MeasuredChoices(  # type: ignore[no-any-return]
            choices, costs, self.common, problems, *self.limits
        )

    def taught(self) -> tuple[list[int], list[int], list[float], list[float], list[float]]:
        """List the table as C++ is taught it: choices, kernels with costs, costs, common, problems.

        All flat: two kernels for each choice, as many costs for each kernel, four sizes and a time
        for each choice of a problem.
        """
        choices, costs, problems = self._parts()
        return (
            [index for both in choices for index in both],
            list(costs),
            [cost for own in costs.values() for cost in own],
            list(self.common),
            [float(number) for sizes, times in problems for number in (*sizes, *times)],
        )

    def _parts(
        self,
    ) -> tuple[
        list[tuple[int, int]],
        dict[int, Costs],
        list[tuple[tuple[float, float, float, float], list[float]]],
    ]:
        """Return the kernels of every choice, their costs, and sizes and times of problems."""
        known = config_indices()
        kept = [self.choices.index(choice) for choice in self.compiled]
        return (
            [_both(choice, known) for choice in self.compiled],
            {known[name]: costs for name, costs in self.costs.items() if name in known},
            [(_sizes(own), [own.times_us[index] for index in kept]) for own in self.problems],
        )

    @property
    def limits(self) -> tuple[int, float, float]:
        """Return the SMs of what was measured, and how far and how much it has a say."""
        return (self.sm_count, *self._limits)

    def allowed(self, kernels: Iterable[str], gate_up_only: Iterable[str] = ()) -> int:
        """Return which of `compiled` are of these kernels, a bit each.

        A layer's first kernel is one of `gate_up_only`, or of `kernels` where there are none.
        """
        second = set(kernels)
        first = set(gate_up_only) or second
        bits = 0
        for index, choice in enumerate(self.compiled):
            gate_up, _, down = choice.partition("+")
            if gate_up in first and (down or gate_up) in second:
                bits |= 1 << index
        return bits

    def gemm(
        self, num_rows: int, num_groups: int, n: int, k: int, sm_count: int, allowed: int
    ) -> Found:
        """Return the best choice for a GEMM: the kernel that it gets."""
        sizes = num_rows, num_groups, n, k
        index, us, nearest, second = self.finder.choose_gemm(*sizes, sm_count, allowed)
        found = self._found((index, us, nearest))
        gate_up, _, down = found.choice.partition("+")
        return found._replace(choice=down if second and down else gate_up)

    def layer(
        self,
        num_rows: int,
        num_groups: int,
        hidden_size: int,
        intermediate_size: int,
        sm_count: int,
        allowed: int,
    ) -> Found:
        """Return the best choice for a layer."""
        sizes = num_rows, num_groups, hidden_size, intermediate_size
        return self._found(self.finder.choose(*sizes, sm_count, allowed))

    def reason(self, found: Found) -> str:
        """Say why a choice was made."""
        text = f"least of {len(self.compiled)} estimates, {found.us:.1f} us for both GEMMs"
        if found.nearest is None:
            return text
        best = min(us for us in found.nearest.times_us if not math.isnan(us))
        where = self.where.replace(", bench/", "; bench/")  # a line each
        return (
            f"{text}; nearest of {len(self.problems)} measured: {found.nearest.name}, "
            f"{best:.1f} us at best; {where}"
        )

    def _found(self, answer: tuple[int, float, int]) -> Found:
        index, us, nearest = answer
        return Found(self.compiled[index], us, self.problems[nearest] if nearest >= 0 else None)


def _words(word: str) -> list[str]:
    """Return a word, or a "-" for each choice that it counts."""
    return ["-"] * int(word[1:] or 1) if word[0] == "-" else [word]


def _problem(words: list[str]) -> MeasuredProblem:
    groups, hidden, intermediate, rows = map(int, words[:4])
    best = float(words[4])
    times = (math.nan if word == "-" else best * (1 + int(word) / 1000) for word in words[5:])
    return MeasuredProblem(groups, hidden, intermediate, rows, tuple(times))


def _sizes(problem: MeasuredProblem) -> tuple[float, float, float, float]:
    return (
        problem.num_rows,
        problem.num_groups,
        problem.hidden_size,
        problem.intermediate_size,
    )


def _both(choice: str, known: Mapping[str, int]) -> tuple[int, int]:
    gate_up, _, down = choice.partition("+")
    return known[gate_up], known[down or gate_up]
