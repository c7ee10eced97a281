"""How a graph is timed, on a card that is not there: warm-ups, samples, early ends, the clock."""

from __future__ import annotations

import contextlib
import types
from dataclasses import replace

import pytest
import torch

from bench import timing
from bench.power import PowerPolicy
from bench.timing import TimingPolicy, time_cuda

MHZ = 1900.0
POLICY = TimingPolicy(samples=7, clock=True)


class Card:
    """A clock in microseconds that replays and spins move on."""

    def __init__(self, us_of_call: list[float]) -> None:
        self.now = 0.0
        self.captured = 0
        self.replays = 0
        self.us_of_call = us_of_call  # of each replay; the last one goes on

    def replay(self) -> None:
        us = self.us_of_call[min(self.replays, len(self.us_of_call) - 1)]
        self.replays += 1
        self.now += us * self.captured

    def spin(self, cycles: int) -> None:
        self.now += 2.5 + cycles / MHZ


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card([50.0, 12.0, 11.0, 10.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = card.now

        def elapsed_time(self, other: Event) -> float:
            return 1e-3 * (other.at - self.at)

    class Graph:
        def capture_begin(self, capture_error_mode: str) -> None:
            assert card.captured == 0

        def capture_end(self) -> None:
            assert card.captured > 0

        def replay(self) -> None:
            card.replay()

    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "CUDAGraph": Graph,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "Event": Event,
        "synchronize": lambda: None,
        "_sleep": card.spin,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in, raising=False)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    return card


def run(card: Card, policy: TimingPolicy = POLICY, *, heavy: bool = False, **limits: float):
    def call(index: int) -> list[torch.Tensor]:
        card.captured += 1
        return []

    return time_cuda(call, 40, policy, compute_heavy=heavy, **limits)


def test_samples_follow_the_warm_ups(card: Card) -> None:
    timed = run(card)
    assert card.captured == 40
    assert card.replays == 3 + 7
    assert (timed.median_us, timed.num_samples) == (pytest.approx(10.0), 7)
    assert timed.sm_mhz == pytest.approx(MHZ)


def test_no_clock_unless_it_is_asked_for(card: Card) -> None:
    assert run(card, replace(POLICY, clock=False)).sm_mhz is None


def test_a_slow_kernel_has_warm_ups_alone(card: Card) -> None:
    timed = run(card, give_up_us=9.0)
    assert (card.replays, timed.num_samples, timed.sm_mhz) == (1, 1, None)
    card.captured = card.replays = 0
    timed = run(card, give_up_us=10.9 / 1.0)
    assert (card.replays, timed.num_samples) == (1, 1)
    card.captured = card.replays = 0
    card.us_of_call = [15.0, 12.0, 11.0, 10.0]
    timed = run(card, give_up_us=10.9)
    assert (card.replays, timed.num_samples) == (3, 3)
    assert timed.median_us == pytest.approx(12.0)


def test_a_kernel_near_the_best_is_timed(card: Card) -> None:
    card.us_of_call = [20.0, 12.0, 11.0, 10.0]
    assert run(card, give_up_us=11.5).num_samples == 7


def test_throttled_warm_ups_are_allowed_for(card: Card) -> None:
    card.us_of_call = [13.0, 13.0, 13.0, 10.0]
    timed = run(card, heavy=True, give_up_us=10.0)
    assert timed.median_us == pytest.approx(10.0)


def test_bursts_end_with_one_that_is_too_slow(card: Card) -> None:
    policy = replace(POLICY, power=PowerPolicy(burst_us=1500.0))  # three replays, two of them timed
    card.us_of_call = [10.0]
    assert run(card, policy, heavy=True, stop_us=10.5).num_samples == 8
    card.captured = card.replays = 0
    assert run(card, policy, heavy=True, stop_us=9.5).num_samples == 2
