"""A PNG plot of whole models: milliseconds of each call, by implementation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.e2e_bars import OURS
from bench.e2e_rows import TTFT, E2ERow

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
WIDTH = 0.85
"""Of all bars of a call, where calls are 1 apart."""


def plot(rows: Sequence[E2ERow], path: Path) -> None:
    """Write bars with their times, a panel for each model and metric; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    timed = [row for row in rows if row.call_ms is not None]
    panels = list(dict.fromkeys((row.model, row.metric) for row in timed))
    names = sorted(dict.fromkeys(row.implementation for row in timed), key=lambda n: n != OURS)
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    height = 3.4 * len(panels) + 0.5
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(11, height), squeeze=False)
    series = sorted(
        dict.fromkeys((row.implementation, row.dtype) for row in timed),
        key=lambda pair: (names.index(pair[0]), pair[1]),
    )
    for axis, (model, metric) in zip(axes.flat, panels, strict=True):
        own = [row for row in timed if (row.model, row.metric) == (model, metric)]
        calls = list(dict.fromkeys((row.batch, row.prompt_tokens) for row in own))
        found: dict[tuple[int, int], dict[tuple[str, str], float]] = {call: {} for call in calls}
        for row in own:
            pair = (row.implementation, row.dtype)
            found[row.batch, row.prompt_tokens][pair] = row.call_ms or 0.0
        width = WIDTH / max(map(len, found.values()))
        for place, times in enumerate(found.values()):
            # Only what was measured takes a place, so that bars of a call stand together.
            there = [pair for pair in series if pair in times]
            for index, pair in enumerate(there):
                ms = times[pair]
                at = place + (index - (len(there) - 1) / 2) * width
                hatch = "///" if pair[1] == "fp8" else None
                bar = axis.bar(
                    at, ms, width, color=colours[pair[0]], hatch=hatch, edgecolor="white"
                )
                axis.bar_label(bar, [f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}"], fontsize=7)
        words = "tokens" if metric == TTFT else "in the cache"
        labels = [f"batch {batch}\n{tokens:,} {words}" for batch, tokens in calls]
        axis.set_xticks(range(len(calls)), labels)
        what = "prompt to first token" if metric == TTFT else "decode step"
        axis.set(yscale="log", ylabel="ms, logarithmic", title=f"{model}: {what}")
        # Room above for the labels; below, the shortest bar is still one.
        heights = [ms for times in found.values() for ms in times.values()]
        axis.set_ylim(min(heights) / 2, max(heights) * 2)
        axis.set_axisbelow(True)
        axis.grid(visible=True, which="major", axis="y", alpha=0.3)
    handles = [
        patches.Patch(
            facecolor=colours[name],
            hatch="///" if dtype == "fp8" else None,
            edgecolor="white",
            label=f"{name} {dtype.upper()}",
        )
        for name, dtype in series
    ]
    figure.legend(handles=handles, loc="upper center", ncols=len(handles) or 1, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.4 / height))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
