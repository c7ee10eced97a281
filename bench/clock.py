"""The SM clock right behind timed work, from a kernel that spins for a number of cycles."""

from __future__ import annotations

import itertools

import torch

# Two lengths, so that what a launch and an event cost falls out: 0.2 ms between them at 1.98 GHz.
SPINS = (40_000, 440_000)


class ClockProbe:
    """Spinning kernels, queued where the probe is made; read after a synchronisation."""

    def __init__(self) -> None:
        """Queue the kernels. They occupy one thread, so they draw no power of their own."""
        self._events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(len(SPINS) + 1)
        ]
        self._events[0].record()
        for cycles, event in zip(SPINS, self._events[1:], strict=True):
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            event.record()

    def mhz(self) -> float:
        """Return the clock."""
        pairs = itertools.pairwise(self._events)
        return mhz_of([1e3 * float(start.elapsed_time(end)) for start, end in pairs])


def mhz_of(times_us: list[float]) -> float:
    """Return cycles a microsecond from the times of both spins."""
    return (SPINS[1] - SPINS[0]) / (times_us[1] - times_us[0])
