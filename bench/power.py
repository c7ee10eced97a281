"""Two regimes of the card's power limit, and which graph replays of a cell are timed in each.

After a pause an H200 runs heavy tensor work at over 1.9 GHz for some 30 to 70 ms, then its 700 W
limit holds it at 1.2 to 1.5 GHz (docs/notes/power-regimes.md). Replays back to back mix the two, in
a proportion that depends on what ran before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

BURST, SUSTAINED = "burst", "sustained"
POWERS = (BURST, SUSTAINED)


@dataclass(frozen=True)
class Schedule:
    """Replays in `bursts` queues, each after a pause, the first `discarded` of each not timed."""

    bursts: int
    discarded: int
    timed: int
    pause_s: float

    def seconds(self, replay_us: float) -> float:
        """Return how long it takes when a replay takes `replay_us`."""
        return self.bursts * (self.pause_s + 1e-6 * replay_us * (self.discarded + self.timed))

    def collect(
        self,
        replay: Callable[[int], list[float]],
        sleep: Callable[[float], None],
        stop_us: float = math.inf,
    ) -> list[float]:
        """Return the timed samples.

        Args:
            replay: Queues a number of replays, waits for them and returns the time of each.
            sleep: Waits a number of seconds.
            stop_us: No burst follows one after which the fastest sample is above this.
        """
        samples: list[float] = []
        for _ in range(self.bursts):
            if self.pause_s:
                sleep(self.pause_s)
            samples += replay(self.discarded + self.timed)[self.discarded :]
            if min(samples) > stop_us:
                break
        return samples


@dataclass(frozen=True)
class PowerPolicy:
    """How a regime is brought about. `regime` is one of `POWERS`."""

    regime: str = BURST
    pause_s: float = 0.1
    burst_us: float = 32e3
    settle_us: float = 300e3
    # A throttled replay took up to 1.32 times as long as one of a burst.
    throttled: float = 1.35

    def schedule(self, samples: int, replay_us: float, *, compute_heavy: bool) -> Schedule:
        """Return when to replay a graph for at least `samples` samples.

        Memory-bound work does not reach the power limit, so a burst of it needs no pause. The first
        replay after a pause is slow, as the clock is still rising.
        """
        if self.regime == SUSTAINED:
            return Schedule(1, math.ceil(self.settle_us / replay_us), samples, 0.0)
        if not compute_heavy:
            return Schedule(1, 0, samples, 0.0)
        # A graph longer than half a burst still needs a replay to discard and one to time.
        most = max(1, math.floor(self.burst_us / replay_us) - 1)
        bursts = math.ceil(samples / most)
        return Schedule(bursts, 1, math.ceil(samples / bursts), self.pause_s)

    def give_up_factor(self, *, compute_heavy: bool) -> float:
        """Return how much slower than its samples a warm-up replay can be: warm-ups follow no
        pause."""
        return self.throttled if compute_heavy and self.regime == BURST else 1.0

    def describe(self) -> str:
        """Return the regime in one line, for the header of a run."""
        if self.regime == SUSTAINED:
            return f"sustained: samples back to back after {1e-6 * self.settle_us:g} s of the same"
        return (
            f"burst: compute-heavy cells in bursts of at most {1e-3 * self.burst_us:g} ms, each "
            f"after a pause of {self.pause_s:g} s and one discarded replay"
        )
