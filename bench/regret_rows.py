"""Rows of `bench.regret`, as lines of a JSONL file of their own; columns are in README.md."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.files import read_rows

CASE_OP, SUMMARY_OP = "dispatch_regret_case", "dispatch_regret"
# Over all held-out cases.
BARS = {"mean": 0.015, "p95": 0.05, "worst": 0.12}


@dataclass(frozen=True)
class RegretCaseRow:
    """The dispatcher's choice beside every other kernel on one held-out problem."""

    op: str
    number: int
    seed: int
    timed_op: str
    case: str
    model: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: str
    scale: str
    accumulate: str
    routing: str
    num_tokens: int
    active_experts: float
    max_rows: int
    chosen: str
    source: str
    chosen_us: float | None
    best: str
    best_us: float | None
    regret: float | None
    floor_us: float
    times: dict[str, float | None]
    disagreement: str
    skipped_reason: str
    device: str
    sm_count: int | None
    torch: str
    cuda: str
    commit: str
    power: str


@dataclass(frozen=True)
class RegretRow:
    """All cases of a file together; None where none has a time."""

    op: str
    mean: float | None
    p95: float | None
    worst: float | None
    num_cases: int
    num_skipped: int
    num_unsteady: int
    seed: int
    device: str
    torch: str
    cuda: str
    commit: str


RegretKind = RegretCaseRow | RegretRow


def to_json(row: RegretKind) -> str:
    """Return a row as one line of JSON."""
    return json.dumps(asdict(row))


def load_regret_rows(path: Path) -> list[RegretKind]:
    """Read a JSONL file written by `bench.regret`."""
    return read_rows(path, _parse, "rows of bench.regret")


def _parse(values: dict[str, Any]) -> RegretKind:
    kinds: dict[str, type[RegretKind]] = {CASE_OP: RegretCaseRow, SUMMARY_OP: RegretRow}
    return kinds[values["op"]](**values)


def latest_cases(rows: Iterable[RegretKind]) -> list[RegretCaseRow]:
    """Return the last row of each case, in order of their numbers."""
    cases = [row for row in rows if isinstance(row, RegretCaseRow)]
    last = {(row.seed, row.number): row for row in cases}
    return [last[key] for key in sorted(last)]


def summarise_regret(cases: Sequence[RegretCaseRow]) -> RegretRow:
    """Return the summary of at least one case; p95 is by nearest rank, so a case's own."""
    timed = sorted(row.regret for row in cases if row.regret is not None)

    def joined(name: str) -> str:
        return ", ".join(sorted({str(getattr(row, name)) for row in cases}))

    return RegretRow(
        op=SUMMARY_OP,
        mean=round(sum(timed) / len(timed), 5) if timed else None,
        p95=round(timed[math.ceil(0.95 * len(timed)) - 1], 5) if timed else None,
        worst=round(timed[-1], 5) if timed else None,
        num_cases=len(timed),
        num_skipped=len(cases) - len(timed),
        num_unsteady=sum(bool(row.disagreement) for row in cases if row.regret is not None),
        seed=cases[0].seed,
        device=joined("device"),
        torch=joined("torch"),
        cuda=joined("cuda"),
        commit=joined("commit"),
    )


def verdicts(row: RegretRow) -> dict[str, bool]:
    """Return which bars a summary passes."""
    values = {name: getattr(row, name) for name in BARS}
    return {
        name: values[name] is not None and values[name] <= limit for name, limit in BARS.items()
    }
