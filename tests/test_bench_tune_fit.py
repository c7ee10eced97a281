"""Costs of kernels are found again from times that were made of them."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from moe_ext._configs import config_indices, planner
from moe_ext._dispatch_measured import Measured

from bench.tune_fit import USUAL, USUAL_COMMON, Timed, _time_us, fit

COSTS = {
    "swap_fp8p_w64_t16": (4.0, 1.5, 0.2, 1.3, 0.9, 0.5, 0.3),
    "swap_fp8p_w128_t64": (2.0, 0.7, 0.1, 1.0, 1.1, 0.7, 0.5),
}


def draw_sizes(draw: random.Random) -> tuple[int, int, int, int]:
    """Rows, groups, hidden and intermediate size."""
    return (
        int(2 ** draw.uniform(0, 16)),
        draw.choice([4, 32, 256]),
        draw.choice([1024, 4096]),
        draw.choice([128, 512, 2048]),
    )


def time_of(name: str, terms: tuple[list[float], list[float]]) -> float:
    costs = np.array([COSTS[name], COSTS[name]])
    return float(_time_us(costs, np.array(terms))[0].sum())


def terms_of(name: str, sizes: tuple[int, int, int, int]) -> tuple[list[float], list[float]]:
    rows, groups, hidden, intermediate = sizes
    first, second = (
        planner().gemm_terms(config_indices()[name], rows, groups, n, k, 132)
        for n, k in ((2 * intermediate, hidden), (hidden, intermediate))
    )
    return first, second


def test_times_add_up_as_in_the_planner() -> None:
    table = Measured(
        "fp8", "promoted", choices=tuple(COSTS), costs=COSTS, problems="", where="", sm_count=132
    )
    draw = random.Random(0)
    for _ in range(50):
        sizes = draw_sizes(draw)
        found = table.layer(*sizes, 132, 3)
        times = {name: time_of(name, terms_of(name, sizes)) for name in COSTS}
        assert found.us == pytest.approx(min(times.values()))
        assert found.choice == min(times, key=lambda name: times[name])


def test_derivatives_are_those_of_the_times() -> None:
    terms = np.array([terms_of("swap_fp8p_w64_t16", (500, 32, 4096, 512))[0]])
    costs = np.array([USUAL])
    us, slopes = _time_us(costs, terms)
    for column in range(len(USUAL)):
        more = costs.copy()
        more[0, column] *= math.exp(1e-5)
        assert slopes[0, column] == pytest.approx(
            (_time_us(more, terms)[0] - us)[0] / 1e-5, rel=1e-3
        )


def test_costs_are_found_from_times_that_share_errors() -> None:
    draw, timed = random.Random(1), []
    for number in range(120):
        sizes = draw_sizes(draw)
        times = {name: time_of(name, terms_of(name, sizes)) for name in COSTS}
        shared = math.exp(draw.gauss(0, 0.05))  # more experts are hit than the estimate knows
        for name, us in times.items():
            ratio = us / min(times.values())
            timed.append(
                Timed(number, (name, name), terms_of(name, sizes), 0.0, us * shared, ratio)
            )
    found = fit(timed, layers=False)
    assert found.common == (0.0, 0.0, USUAL_COMMON[2])
    assert set(found.costs) == set(COSTS)
    off = []
    for one in timed:
        costs = np.array([found.costs[name] for name in one.kernels])
        us = float(_time_us(costs, np.array(one.terms))[0].sum())
        off.append(math.log(us / time_of(one.kernels[0], one.terms)))
    assert max(map(abs, off)) < 0.15
    assert np.sqrt(np.mean(np.square(off))) < 0.04


def test_of_layers_there_is_more_than_both_gemms() -> None:
    draw, timed = random.Random(2), []
    for number in range(60):
        sizes = draw_sizes(draw)
        for name in COSTS:
            terms = terms_of(name, sizes)
            timed.append(Timed(number, (name, name), terms, 9e6, time_of(name, terms) + 12.0, 1.0))
    constant, by_byte, _ = fit(timed, layers=True).common
    assert constant + 2 * by_byte == pytest.approx(12.0, rel=0.15)
