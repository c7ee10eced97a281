"""Tables, bars and a plot of `bench.e2e_transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.e2e_rows import DECODE, TTFT, E2ERow
from bench.tables import markdown_table

OURS = "moe_ext"
BARRED = ("qwen3-30b-a3b", "bf16")
"""The model and the dtype that have bars."""
MIN_DECODE_SPEEDUP = {1: 1.2, 8: 1.25, 64: 1.1}
"""Tokens per second of a captured step over the best other implementation's, by batch, BF16."""
MAX_DECODE_EXPERTS = {1: 0.5, 8: 0.5, 64: 0.6}
"""Time of the experts of a step over the same one's."""
MAX_TTFT = {2048: 0.75, 8192: 0.65}
"""Time to the first token over the best other implementation's, by prompt, batch 1, BF16."""
_TITLES = {TTFT: "Milliseconds to the first token", DECODE: "Tokens per second of a decode step"}

Group = tuple[str, str, str, int, int]


def by_cell(rows: Sequence[E2ERow]) -> dict[Group, dict[str, E2ERow]]:
    """Return the rows of each cell by implementation, in the order of the rows."""
    cells: dict[Group, dict[str, E2ERow]] = {}
    for row in rows:
        group = (row.model, row.dtype, row.metric, row.batch, row.prompt_tokens)
        cells.setdefault(group, {})[row.implementation] = row
    return cells


def best_other(cell: dict[str, E2ERow]) -> E2ERow | None:
    """Return the row of the fastest other implementation that was measured."""
    others = [row for name, row in cell.items() if name != OURS and row.call_ms is not None]
    return min(others, key=lambda row: row.call_ms or 0.0, default=None)


def experts_ms(row: E2ERow) -> float:
    """Return the time that the experts of a call take."""
    return (row.call_ms or 0.0) * (row.experts_share or 0.0)


def misses(rows: Sequence[E2ERow]) -> list[str]:
    """Say every bar that a cell misses; only cells with ours and another's time have bars."""
    missed = []
    for (model, dtype, metric, batch, prompt), cell in by_cell(rows).items():
        ours, other = cell.get(OURS), best_other(cell)
        if (model, dtype) != BARRED or ours is None or ours.call_ms is None or other is None:
            continue
        ratio = ours.call_ms / (other.call_ms or 1.0)
        name = f"{dtype} {metric} batch {batch} at {prompt}"
        if metric == TTFT and batch == 1 and prompt in MAX_TTFT and ratio > MAX_TTFT[prompt]:
            missed.append(f"{name}: {ratio:.2f} of {other.implementation}, {MAX_TTFT[prompt]}")
        if metric != DECODE or batch not in MIN_DECODE_SPEEDUP:
            continue
        if 1 / ratio < MIN_DECODE_SPEEDUP[batch]:
            missed.append(
                f"{name}: {1 / ratio:.2f} times {other.implementation}, {MIN_DECODE_SPEEDUP[batch]}"
            )
        experts = experts_ms(ours) / max(experts_ms(other), 1e-9)
        if experts > MAX_DECODE_EXPERTS[batch]:
            missed.append(
                f"{name}, experts: {experts:.2f} of {other.implementation}, "
                f"{MAX_DECODE_EXPERTS[batch]}"
            )
    return missed


def e2e_markdown(rows: Sequence[E2ERow]) -> str:
    """Return one table for each model, dtype and metric, and what was skipped."""
    cells = by_cell(rows)
    parts = []
    for model, dtype, metric in dict.fromkeys(group[:3] for group in cells):
        own = {
            group[3:]: cell for group, cell in cells.items() if group[:3] == (model, dtype, metric)
        }
        names = list(dict.fromkeys(name for cell in own.values() for name in cell))
        lines = [
            [str(batch), str(prompt), *(_cell(cell.get(name)) for name in names), _against(cell)]
            for (batch, prompt), cell in own.items()
        ]
        header = ["batch", "tokens" if metric == TTFT else "position", *names, "best other / ours"]
        parts.append(
            f"{_TITLES[metric]} (time of a call in ms, experts' share), {model}, {dtype}.\n\n"
            f"{markdown_table(header, lines)}"
        )
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.skipped_reason:
            what = f"{row.metric} batch {row.batch} at {row.prompt_tokens}"
            key = (row.dtype, row.implementation, row.skipped_reason)
            reasons.setdefault(key, []).append(what)
    if reasons:
        skipped = [
            f"- {dtype} {implementation}, {'; '.join(calls)}: {reason}"
            for (dtype, implementation, reason), calls in reasons.items()
        ]
        parts.append("Not measured:\n\n" + "\n".join(skipped))
    if rows:
        last = rows[-1]
        parts.append(
            f"{last.device}; torch {last.torch}; Transformers {last.transformers}; commit "
            f"{last.commit}."
        )
    return "\n\n".join(parts)


def _cell(row: E2ERow | None) -> str:
    if row is None or row.value is None:
        return ""
    star = "" if row.captured or row.metric == TTFT else ", not captured"
    return f"{row.value:.4g} ({row.call_ms:.4g}, {row.experts_share:.0%}{star})"


def _against(cell: dict[str, E2ERow]) -> str:
    ours, other = cell.get(OURS), best_other(cell)
    if ours is None or not ours.call_ms or other is None or not other.call_ms:
        return ""
    return f"{other.call_ms / ours.call_ms:.2f}"


def plot(rows: Sequence[E2ERow], path: Path) -> None:
    """Write bars of each cell's call time, a panel for each dtype and metric; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = by_cell([row for row in rows if row.value is not None])
    panels = list(dict.fromkeys(group[1:3] for group in cells))
    figure, axes = pyplot.subplots(
        len(panels) or 1, 1, figsize=(9, 3.2 * (len(panels) or 1)), squeeze=False
    )
    names = list(dict.fromkeys(name for cell in cells.values() for name in cell))
    for axis, panel in zip(axes.flat, panels, strict=False):
        own = {group[3:]: cell for group, cell in cells.items() if group[1:3] == panel}
        width = 0.8 / len(names)
        for index, name in enumerate(names):
            at = [place for place, cell in enumerate(own.values()) if name in cell]
            heights = [cell[name].call_ms or 0.0 for cell in own.values() if name in cell]
            axis.bar([place + index * width for place in at], heights, width, label=name)
        labels = [f"batch {batch}\n{prompt}" for batch, prompt in own]
        axis.set_xticks([place + 0.4 - width / 2 for place in range(len(own))], labels)
        axis.set(yscale="log", ylabel="ms a call", title=f"{panel[0]} {panel[1]}")
        axis.grid(visible=True, which="major", axis="y", alpha=0.3)
        axis.legend(fontsize=8, ncols=len(names), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
