"""One definition of "time": CUDA-graph replay with cold weights, per-call median over replays."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from bench.clock import ClockProbe
from bench.power import PowerPolicy

Call = Callable[[int], Sequence[torch.Tensor]]
"""Runs call number `index`: its own weight copy and routing draw. Returns one output per stage."""


@dataclass(frozen=True)
class TimingPolicy:
    """How often a call is repeated, and what keeps its weights out of the L2 cache."""

    samples: int = 20
    warmup: int = 3
    l2_bytes: float = 60e6
    cold_factor: float = 4.0
    graph_us: float = 2000.0
    max_calls: int = 64
    power: PowerPolicy = field(default_factory=PowerPolicy)
    clock: bool = False  # whether the SM clock is measured behind each burst of samples

    def num_copies(self, hit_bytes: float) -> int:
        """Return the weight copies to rotate so that a copy is evicted before its next turn."""
        return max(2, math.ceil(self.cold_factor * self.l2_bytes / max(hit_bytes, 1.0)))

    def num_calls(self, floor_us: float, copies: int) -> int:
        """Return the calls of one graph: about `graph_us` of work, a multiple of `copies`.

        The gap between two graph replays (about 5 us) is spread over the calls.
        """
        wanted = min(self.max_calls, math.ceil(self.graph_us / floor_us))
        return copies * max(1, math.ceil(wanted / copies))

    def describe(self) -> str:
        """Return the policy in one line, for the header of a run."""
        return (
            f"CUDA-graph replay, {self.samples} samples after {self.warmup} warm-ups, a sample is "
            f"one graph of about {self.graph_us / 1e3:g} ms of calls; cold weights: "
            f"copies in rotation hold >= {self.cold_factor:g} x {self.l2_bytes / 1e6:g} MB; "
            f"{self.power.describe()}"
        )


# Enough of each kernel to tell which ones deserve more. So few replays heat the card less than the
# pause of a whole burst is made for.
FIRST_SAMPLES, FIRST_WARMUP, FIRST_PAUSE_S = 3, 2, 0.05


def first_pass(policy: TimingPolicy) -> TimingPolicy:
    """Return the policy of a first look at many kernels."""
    return replace(
        policy,
        samples=min(FIRST_SAMPLES, policy.samples),
        warmup=min(FIRST_WARMUP, policy.warmup),
        power=replace(policy.power, pause_s=min(FIRST_PAUSE_S, policy.power.pause_s)),
    )


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over the samples, and the lowest SM clock behind a burst of them."""

    median_us: float
    p10_us: float
    p90_us: float
    num_samples: int
    sm_mhz: float | None = None


def summarise(samples_us: Sequence[float]) -> Timing:
    """Return median and spread of per-call times."""
    values = torch.tensor(samples_us, dtype=torch.float64)
    p10, median, p90 = torch.quantile(
        values, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    ).tolist()
    return Timing(median, p10, p90, len(samples_us))


def time_cuda(
    call: Call,
    calls: int,
    policy: TimingPolicy,
    *,
    compute_heavy: bool,
    give_up_us: float = math.inf,
    stop_us: float = math.inf,
) -> Timing:
    """Time `calls` calls captured in one CUDA graph.

    Args:
        call: Must have run once already, so that nothing is loaded or compiled under capture.
        calls: Calls per graph; call number i gets index i.
        policy: Number of samples and warm-ups, regime of the power limit.
        compute_heavy: Whether the work can reach the power limit.
        give_up_us: Return after the warm-up replays when their fastest is above this time per
            call, or above what throttling makes of it; after the first of them when that is twice
            as long: a tuner has no use for an exact time of a slow kernel.
        stop_us: Return after a burst when the fastest sample so far is above this time.
    """
    # torch.cuda.graph() empties the allocator's cache at every capture, which would cost more here
    # than the measurement; capture_begin and capture_end do not.
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for index in range(calls):
                call(index)
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)

    give_up_us *= policy.power.give_up_factor(compute_heavy=compute_heavy)
    first = 1 if math.isfinite(give_up_us) else policy.warmup
    samples, _ = _replay(graph, calls, first)
    if first < policy.warmup and min(samples) <= 2 * give_up_us:
        samples += _replay(graph, calls, policy.warmup - first)[0]
    # The fastest, as the first is slow where the card was idle.
    fastest_us = min(samples)
    clocks: list[float] = []
    if fastest_us <= give_up_us:
        schedule = policy.power.schedule(
            policy.samples, fastest_us * calls, compute_heavy=compute_heavy
        )

        def replay(replays: int) -> list[float]:
            times, mhz = _replay(graph, calls, replays, clock=policy.clock)
            clocks.extend([mhz] if mhz is not None else [])
            return times

        samples = schedule.collect(replay, time.sleep, stop_us)
    return replace(summarise(samples), sm_mhz=min(clocks, default=None))


def _replay(
    graph: torch.cuda.CUDAGraph, calls: int, replays: int, *, clock: bool = False
) -> tuple[list[float], float | None]:
    """Return the time per call of each replay, and the clock behind them where it is asked for."""
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(replays + 1)
    ]
    # All replays are queued at once: the host stays ahead and its launch time is hidden.
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    probe = ClockProbe() if clock else None
    torch.cuda.synchronize()
    pairs = itertools.pairwise(events)
    times = [1e3 * float(start.elapsed_time(end)) / calls for start, end in pairs]
    return times, None if probe is None else probe.mhz()


def time_host(call: Call, calls: int = 20) -> float:
    """Return the median microseconds that an eager call keeps the host, which must stay ahead of
    the device: few calls, from an empty queue."""
    torch.cuda.synchronize()
    times = []
    for index in range(calls):
        start = time.perf_counter()
        call(index)
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return summarise(times).median_us


def time_wall(call: Call, calls: int, policy: TimingPolicy) -> Timing:
    """Time calls on the CPU by the wall clock: exercises the command line, measures nothing."""
    samples = []
    for _ in range(policy.samples):
        start = time.perf_counter()
        for index in range(calls):
            call(index)
        samples.append(1e6 * (time.perf_counter() - start) / calls)
    return summarise(samples)
