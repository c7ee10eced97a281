"""Tables of `bench.regret`, made from its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.ops import LAYER
from bench.regret_rows import BARS, RegretCaseRow, RegretKind, latest_cases, summarise_regret
from bench.tables import markdown_table

WORST_SHOWN = 25
MISSING = "-"


def page(rows: Sequence[RegretKind]) -> str:
    """Return the report."""
    cases = latest_cases(rows)
    if not cases:
        return "# Regret of the dispatcher\n\nNo case has been timed.\n"
    summary = summarise_regret(cases)
    head = (
        f"{summary.device}; torch {summary.torch}; CUDA {summary.cuda}; commit {summary.commit}; "
        f"seed {summary.seed}.\nTime of the dispatcher's kernels over the fastest compiled ones', "
        "less 1, on layers and token counts that\nthe tuner does not see. Method and columns: "
        "`bench/README.md`."
    )
    sections = {
        "All cases": _all(cases),
        "By part": _by_part(cases),
        f"The worst {WORST_SHOWN}": _worst(cases),
        "Skipped": _skipped(cases),
    }
    parts = [f"## {title}\n\n{text}" for title, text in sections.items() if text]
    return "\n\n".join(["# Regret of the dispatcher", head, *parts]) + "\n"


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.2f} %"


def _all(cases: Sequence[RegretCaseRow]) -> str:
    summary = summarise_regret(cases)
    header = ("cases", "skipped", "disagree with themselves", *BARS)
    counts = (summary.num_cases, summary.num_skipped, summary.num_unsteady)
    values = [_percent(value) for value in (summary.mean, summary.p95, summary.worst)]
    bars = ["bar", "", "", *(f"{100 * limit:g} %" for limit in BARS.values())]
    return markdown_table(header, [[*map(str, counts), *values], bars])


def _kind(row: RegretCaseRow) -> str:
    sums = " fast" if row.accumulate == "fast" else ""
    return "BF16" if row.dtype == "bf16" else f"FP8 {row.scale}{sums}"


def _what(row: RegretCaseRow) -> str:
    return "layer" if row.timed_op == LAYER else "pair"


def _tokens(row: RegretCaseRow) -> str:
    limits = (15, 127, 1023)
    least = 1
    for limit in limits:
        if row.num_tokens <= limit:
            return f"T = {least} to {limit}"
        least = limit + 1
    return f"T >= {least}"


PARTS: tuple[Callable[[RegretCaseRow], str], ...] = (
    _what,
    lambda row: f"{_what(row)}, {_kind(row)}",
    lambda row: row.routing,
    _tokens,
    lambda row: f"chosen by {row.source}",
    lambda row: f"intermediate size {'' if row.intermediate_size % 128 == 0 else 'not '}in 128s",
)


def _by_part(cases: Sequence[RegretCaseRow]) -> str:
    body = []
    for part in PARTS:
        groups: dict[str, list[RegretCaseRow]] = {}
        for row in cases:
            groups.setdefault(part(row), []).append(row)
        for name in sorted(groups):
            summary = summarise_regret(groups[name])
            values = [_percent(value) for value in (summary.mean, summary.p95, summary.worst)]
            body.append([name, str(summary.num_cases), *values])
    return markdown_table(("part", "cases", *BARS), body)


def _worst(cases: Sequence[RegretCaseRow]) -> str:
    timed = [row for row in cases if row.regret is not None]
    worst = sorted(timed, key=lambda row: (-(row.regret or 0.0), row.number))[:WORST_SHOWN]
    header = ("case", "sizes", "kind", "routing", "T", "chosen", "us", "best", "us", "regret", "by")
    return markdown_table(
        header,
        [
            [
                str(row.number),
                f"{row.case} ({row.model})",
                f"{_what(row)} {_kind(row)}",
                row.routing,
                str(row.num_tokens),
                row.chosen,
                f"{row.chosen_us:.1f}",
                row.best,
                f"{row.best_us:.1f}",
                _percent(row.regret) + (" (unsteady)" if row.disagreement else ""),
                row.source,
            ]
            for row in worst
        ],
    )


def _skipped(cases: Sequence[RegretCaseRow]) -> str:
    return "\n".join(
        f"- {row.number}, {row.case}, {_what(row)} {_kind(row)}, T = {row.num_tokens}: "
        f"{row.skipped_reason}"
        for row in cases
        if row.regret is None
    )
