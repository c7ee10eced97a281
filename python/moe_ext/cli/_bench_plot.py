"""The picture of `moe-ext bench`: time and floor over tokens or rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_ext.cli._bench_run import Measurement, Sweep
from moe_ext.cli._figure import make_figure, save_figure


def draw(sweep: Sweep, device: str, found: Sequence[Measurement], path: Path) -> None:
    """Write the picture, which appears when it is complete.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = make_figure("bench", 8.0, 5.0)
    axes = figure.add_subplot()
    counts = [own.count for own in found]
    axes.plot(counts, [own.us for own in found], marker="o", label="measured")
    axes.plot(counts, [own.told.floor_us for own in found], linestyle="--", label="floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel(sweep.counted)
    axes.set_ylabel("us")
    axes.set_title(f"{sweep.title}\n{device}", fontsize="medium")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    save_figure(figure, path)
