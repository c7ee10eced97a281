"""What each kernel needs for the terms of its time, fitted to the times of measured problems.

Least squares over logs of estimated over measured times, in rounds: what all kernels of a problem
have in common (its routing hits more experts or fewer than the estimate knows) is taken out of it
between two rounds. The terms and how they add up are those of csrc/grouped_gemm/estimate.hpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Launch, a wave, 256 bytes of K, products, weights, on-chip reads and activations: what a kernel is
# taken to need that was not measured, and what measured ones are drawn to.
USUAL = (2.0, 1.0, 0.12, 1.1, 1.05, 0.6, 0.3)
# Of a layer: microseconds besides both GEMMs, and for each byte of its rows at the nominal rate. Of
# two different kernels in a row: the second's cold code (docs/notes/cold-code.md), of pairs not
# fitted, as two were timed only where they were hoped to be better.
USUAL_COMMON = (4.0, 1.0, 5.0)
READ_BYTES_PER_US = 4.5e6
# A time off by a tenth weighs as much as a cost e^5 times the usual one: that has a say only where
# a kernel's rows have none. Five times as much cost 0.2 % on layers that were left out.
_PULL = 0.02
_SPREAD = 0.1
_ROUNDS, _STEPS = 3, 12
# Kernels far from a problem's best need not be known well.
_FADE = 3.0
# Of a problem: kernels' worth of no common error.
_CALM = 0.3


@dataclass(frozen=True)
class Timed:
    """The time of one choice on one problem: both kernels, and the terms of both GEMMs."""

    problem: int
    kernels: tuple[str, str]
    terms: tuple[Sequence[float], Sequence[float]]
    row_bytes: float
    us: float
    ratio: float  # over the problem's best


@dataclass(frozen=True)
class Fit:
    """What was found: costs by kernel, and what is common to all, as in `USUAL_COMMON`."""

    costs: dict[str, tuple[float, ...]]
    common: tuple[float, float, float]


def fit(timed: Sequence[Timed], *, layers: bool) -> Fit:
    """Find the costs of all kernels that have times, and of what is common to all."""
    names = sorted({name for one in timed for name in one.kernels})
    usual = np.log(np.concatenate([np.array([USUAL for _ in names]).ravel(), USUAL_COMMON]))
    at = {name: number for number, name in enumerate(names)}
    first, second = (np.array([at[one.kernels[i]] for one in timed]) for i in (0, 1))
    terms = np.array([one.terms for one in timed])
    events = np.array(
        [
            (layers, layers * one.row_bytes / READ_BYTES_PER_US, len(set(one.kernels)) - 1)
            for one in timed
        ]
    )
    measured = np.log([one.us for one in timed])
    weights = np.exp(-0.5 * _FADE * np.minimum([one.ratio - 1 for one in timed], 1.0))
    problems = np.array([one.problem for one in timed])
    count = problems.max() + 1
    wide = len(names) * len(USUAL)

    def predicted(logs: Floats) -> tuple[Floats, Floats]:
        """Return logs of the estimates and their derivatives by the logs of the costs."""
        costs = np.exp(logs[:wide]).reshape(len(names), -1)
        us = np.zeros(len(timed))
        slopes = np.zeros((len(timed), len(logs)))
        rows = np.arange(len(timed))
        for which, kernel in ((0, first), (1, second)):
            own, by_cost = _time_us(costs[kernel], terms[:, which])
            us += own
            for column in range(len(USUAL)):
                np.add.at(slopes, (rows, kernel * len(USUAL) + column), by_cost[:, column])
        us_of_events = events * np.exp(logs[wide:])
        us += us_of_events.sum(1)
        slopes[:, wide:] = us_of_events * layers
        return np.log(us), slopes / us[:, None]

    logs, common = usual.copy(), np.zeros(count)
    for _ in range(_ROUNDS):
        logs = _descend(logs, usual, predicted, measured - common[problems], weights)
        off = weights * (measured - predicted(logs)[0])
        common = np.bincount(problems, off, count) / (np.bincount(problems, weights, count) + _CALM)
    costs = np.exp(logs[:wide]).reshape(len(names), -1)
    constant, by_byte, different = np.exp(logs[wide:]) * (layers, layers, 1)
    return Fit(
        {name: tuple(float(f"{c:.3g}") for c in costs[at[name]]) for name in names},
        (float(f"{constant:.3g}"), float(f"{by_byte:.3g}"), float(f"{different:.3g}")),
    )


def _time_us(costs: Floats, terms: Floats) -> tuple[Floats, Floats]:
    """Return times as `time_us` in C++, and their derivatives by the logs of the costs."""
    latency = costs[:, 1] * terms[:, 0] + costs[:, 2] * terms[:, 1]
    parts = np.stack([latency, *(costs[:, 3:6] * terms[:, 2:5]).T])
    norm = (parts**4).sum(0) ** 0.25
    by_part = (parts / np.maximum(norm, 1e-9)) ** 3
    activations = costs[:, 6] * terms[:, 5]
    slopes = np.stack(
        [
            costs[:, 0],
            by_part[0] * costs[:, 1] * terms[:, 0],
            by_part[0] * costs[:, 2] * terms[:, 1],
            *(by_part[1:] * parts[1:]),
            activations,
        ],
        axis=1,
    )
    return costs[:, 0] + norm + activations, slopes


def _descend(
    logs: Floats,
    usual: Floats,
    predicted: Callable[[Floats], tuple[Floats, Floats]],
    measured: Floats,
    weights: Floats,
) -> Floats:
    """Return the costs of least weighted squares, by damped Gauss-Newton steps."""

    def loss(at: Floats) -> float:
        errors = (predicted(at)[0] - measured) / _SPREAD
        robust = 2 * (np.sqrt(1 + errors**2) - 1)
        return float(_SPREAD**2 * (weights * robust).sum() + (_PULL**2 * (at - usual) ** 2).sum())

    damping, now = 1e-3, loss(logs)
    for _ in range(_STEPS):
        estimate, slopes = predicted(logs)
        errors = estimate - measured
        soft = weights / np.sqrt(1 + (errors / _SPREAD) ** 2)
        normal = slopes.T @ (soft[:, None] * slopes) + _PULL**2 * np.eye(len(logs))
        gradient = slopes.T @ (soft * errors) + _PULL**2 * (logs - usual)
        for _ in range(6):
            step = np.linalg.solve(normal + damping * np.eye(len(logs)), gradient)
            tried = logs - np.clip(step, -1.0, 1.0)
            after = loss(tried)
            if math.isfinite(after) and after < now:
                logs, now, damping = tried, after, damping / 3
                break
            damping *= 4
        else:
            break
    return logs
