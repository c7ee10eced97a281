"""Lines, tables and the plot of `bench.stability`, made from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from bench.stability_plan import tail_of
from bench.stability_rows import (
    DispatchHostRow,
    PreloadRow,
    StabilityKind,
    StabilityRow,
    latest_rows,
)
from bench.tables import markdown_table

R = TypeVar("R", StabilityRow, PreloadRow, DispatchHostRow)
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
MISSING = "-"


def page(rows: Sequence[StabilityKind]) -> str:
    """Return the report; a section without rows is left out."""
    rows = latest_rows(rows)
    sections = {
        "Eager calls": _calls_table(_of(rows, StabilityRow)),
        "Preload": _preload_table(_of(rows, PreloadRow)),
        "Dispatch on the host": _dispatch_table(_of(rows, DispatchHostRow)),
    }
    parts = [f"## {title}\n\n{text}" for title, text in sections.items() if text]
    head = f"# Stability\n\n{_provenance(rows)}\nMethod and columns: `bench/README.md`."
    return "\n\n".join([head, *parts]) + "\n"


def _of(rows: Sequence[StabilityKind], kind: type[R]) -> list[R]:
    return [row for row in rows if isinstance(row, kind)]


def _provenance(rows: Sequence[StabilityKind]) -> str:
    device, torch, cuda, commit = (
        ", ".join(sorted({str(getattr(row, name)) for row in rows}))
        for name in ("device", "torch", "cuda", "commit")
    )
    return f"{device}; torch {torch}; CUDA {cuda}; commit {commit}."


def label_of(row: StabilityRow) -> str:
    """Name a row's calls."""
    scale = "" if row.dtype == "bf16" else f" {row.scale}"
    preload = " preloaded" if row.preload else ""
    tokens = "all T" if row.num_tokens is None else f"T = {row.num_tokens}"
    return f"{row.provider}{preload}, {row.case} {row.dtype.upper()}{scale}, {tokens}"


def _number(value: float | None, digits: int = 0) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _calls_table(rows: Sequence[StabilityRow]) -> str:
    if not rows:
        return ""
    header = (
        *("calls", "p50 us", "p99", "p99.9", "max", "over floor p50", "p99 / p50", "p99.9 / p50"),
        *("device p99 / p50", "p99.9 / p50", "slowest / predicted", "first call ms"),
        *("compilations", "loaded late", "MiB late"),
    )
    body = [
        [
            label_of(row),
            *(_number(value, 1) for value in (row.p50_us, row.p99_us, row.p999_us, row.max_us)),
            _number(row.ratio_p50, 2),
            _over(row.ratio_p99, row.ratio_p50),
            _over(row.ratio_p999, row.ratio_p50),
            _over(row.device_ratio_p99, row.device_ratio_p50),
            _over(row.device_ratio_p999, row.device_ratio_p50),
            _number(row.slowest_over_predicted, 2),
            _number(row.first_call_ms, 1),
            _number(row.compilations),
            _number(row.modules_loaded_late),
            _number(row.late_mib, 1),
        ]
        for row in rows
    ]
    skipped = [f"- {label_of(row)}: {row.skipped_reason}" for row in rows if row.skipped_reason]
    return "\n".join([markdown_table(header, body), *(["", *skipped] if skipped else [])])


def _over(value: float | None, base: float | None) -> str:
    return MISSING if value is None or not base else f"{value / base:.3f}"


def _preload_table(rows: Sequence[PreloadRow]) -> str:
    if not rows:
        return ""
    header = (
        *("layer", "kernels", "ms", "MiB", "first call ms", "median ms", "first / median"),
        "first call ms without preload",
    )
    body = [
        [
            f"{row.case} {row.dtype.upper()} {row.scale}, T = {row.num_tokens}",
            str(row.num_kernels),
            _number(row.ms, 1),
            _number(row.mib, 1),
            _number(row.first_call_ms, 3),
            _number(row.median_ms, 3),
            f"{row.first_call_ms / row.median_ms:.2f}",
            _number(row.first_call_without_ms, 1),
        ]
        for row in rows
    ]
    return markdown_table(header, body)


def _dispatch_table(rows: Sequence[DispatchHostRow]) -> str:
    if not rows:
        return ""
    body = [
        [
            "met before" if row.met_before else "new",
            _number(row.us, 2),
            _number(row.max_us, 2),
            str(row.num_problems),
        ]
        for row in rows
    ]
    return markdown_table(("problems", "us", "slowest batch", "choices"), body)


def line_of(row: StabilityKind) -> str:
    """Say a row in a line."""
    if isinstance(row, StabilityRow):
        said = row.skipped_reason or (
            f"p50 {row.p50_us:.0f} us, p99 {row.p99_us:.0f}, p99.9 {row.p999_us:.0f}, max "
            f"{row.max_us:.0f}; {row.compilations} compilations, {row.modules_loaded_late} late"
        )
        return f"{label_of(row)}: {said}"
    if isinstance(row, PreloadRow):
        return (
            f"preload: {row.num_kernels} kernels, {row.ms:.0f} ms, {row.mib:.1f} MiB; first call "
            f"{row.first_call_ms:.3f} ms, median {row.median_ms:.3f}, without preload "
            f"{row.first_call_without_ms:.1f}"
        )
    return f"choice, {'met before' if row.met_before else 'new'}: {row.us:.2f} us"


def plot(rows: Sequence[StabilityKind], path: Path) -> None:
    """Write a PNG of every call over its tokens, and of the tails; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in _of(latest_rows(rows), StabilityRow) if row.calls]
    figure, (by_tokens, by_rank) = pyplot.subplots(1, 2, figsize=(13, 5))
    for number, row in enumerate(shown):
        colour = COLOURS[number % len(COLOURS)]
        tokens, walls, _, floors = zip(*row.calls, strict=True)
        by_tokens.scatter(tokens, walls, s=5, alpha=0.5, color=colour, label=label_of(row))
        by_tokens.scatter(tokens, floors, s=1, alpha=0.3, color="black")
        ratios = sorted(wall / floor for wall, floor in zip(walls, floors, strict=True))
        slower = [1 - rank / len(ratios) for rank in range(len(ratios))]
        by_rank.step(ratios, slower, where="post", color=colour, label=label_of(row))
        by_rank.axvline(tail_of(ratios).p50, color=colour, alpha=0.3, linewidth=1)
    by_tokens.set(xlabel="tokens (before top-k)", ylabel="us from call to result; black: floor")
    by_tokens.set(xscale="log", yscale="log")
    by_tokens.set_xscale("log", base=2)
    by_rank.set(
        xlabel="time over the call's own floor; line: median", ylabel="share of slower calls"
    )
    by_rank.set(xscale="log", yscale="log")
    for axis in (by_tokens, by_rank):
        axis.grid(visible=True, which="major", alpha=0.3)
    by_rank.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
