"""Progress of a run: a bar where rich is installed and a terminal watches, else plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from bench.layouts import CONTIGUOUS
from bench.rows import Row

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

PLAIN_INTERVAL_S = 5.0


class Progress:
    """Counts finished rows and prints one compact line per case, dtype and variant."""

    def __init__(self, total: int) -> None:
        """Start the clock; the bar appears on entering the context."""
        self.total, self.done = total, 0
        self.started = self.last_print = time.perf_counter()
        self._series: dict[str, list[str]] = {}
        self._case = ("", "", "")
        self._reasons: set[tuple[str, str]] = set()
        self._bar = _rich_bar() if sys.stdout.isatty() else None

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def __enter__(self) -> Progress:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("measuring", total=self.total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the bar and print what is left."""
        self.end_series()
        if self._bar is not None:
            self._bar.stop()

    def add(self, row: Row) -> None:
        """Count a row; a new case or dtype ends the lines of the one before."""
        self.done += 1
        if self._case != (row.dtype, row.case, row.routing):
            self.end_series()
            self._case = (row.dtype, row.case, row.routing)
        name = " ".join(
            part
            for part in (
                row.dtype,
                row.scale if row.dtype == "fp8" else "",
                row.accumulate,
                "" if row.layout == CONTIGUOUS else row.layout,
                "batch-invariant" if row.batch_invariant else "",
                row.case,
                row.stage,
                row.provider,
            )
            if part
        )
        ratio = "skipped" if row.ratio_to_floor is None else f"{row.ratio_to_floor:.2f}"
        self._series.setdefault(name, []).append(f"{row.num_tokens}:{ratio}")
        if row.skipped_reason and (name, row.skipped_reason) not in self._reasons:
            self._reasons.add((name, row.skipped_reason))
            self.say(f"  {name} T={row.num_tokens} skipped: {row.skipped_reason}")
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif time.perf_counter() - self.last_print > PLAIN_INTERVAL_S:
            self.say(f"  {self.done}/{self.total} rows after {self.seconds:.0f} s")
            self.last_print = time.perf_counter()

    def end_series(self) -> None:
        """Print the ratios to the floor of the case that has ended, by token count."""
        for name, ratios in self._series.items():
            self.say(f"{name}: {' '.join(ratios)}")
        self._series.clear()

    def say(self, line: str) -> None:
        """Print above the bar."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, flush=True)


@contextmanager
def counted(total: int, label: str, every: int = 50) -> Iterator[Callable[[], None]]:
    """Give a function that counts one step: a bar, drawn at every so many steps and by no thread of
    its own, which would get into the times of what is counted."""
    bar = _rich_bar(auto_refresh=False) if sys.stdout.isatty() else None
    if bar is None:
        yield lambda: None
        return
    task = bar.add_task(label, total=total)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if done % every == 0:
            bar.update(task, completed=done)
            bar.refresh()

    with bar:
        yield step


def _rich_bar(*, auto_refresh: bool = True) -> Bar | None:
    try:
        from rich.progress import Progress as RichProgress
    except ImportError:
        return None
    return RichProgress(transient=True, auto_refresh=auto_refresh)
