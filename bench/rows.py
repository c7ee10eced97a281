"""One measurement as a row of a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.files import read_rows
from bench.layouts import CONTIGUOUS
from bench.power import BURST

# Regime of files from before there was a choice: replays back to back, without pauses.
MIXED = "mixed"


@dataclass(frozen=True)
class Row:
    """Columns and units are described in README.md; `None` where nothing was measured."""

    op: str
    stage: str
    case: str
    provider: str
    dtype: str
    scale: str
    accumulate: str
    routing: str
    num_tokens: int
    active_experts: float
    max_rows: int
    config: str
    median_us: float | None
    p10_us: float | None
    p90_us: float | None
    floor_us: float
    ratio_to_floor: float | None
    traffic_floor_us: float
    tflops: float | None
    gbps: float | None
    max_err: float | None
    num_samples: int
    skipped_reason: str
    device: str
    torch: str
    cuda: str
    commit: str
    power: str = MIXED
    layout: str = CONTIGUOUS
    batch_invariant: bool = False
    host_us: float | None = None
    again_us: float | None = None
    sm_mhz: float | None = None
    sm_count: int | None = None
    visit: str = ""

    def to_json(self) -> str:
        """Return the row as one line of JSON."""
        return json.dumps(asdict(self))


def load_rows(path: Path) -> list[Row]:
    """Read a JSONL file written by `bench.run` or `bench.tune`, this version or an older one."""
    return read_rows(path, lambda columns: Row(**columns), "rows of bench.run or bench.tune")


def measurement(row: Row) -> tuple[object, ...]:
    """Return what tells measurements apart, but for the regime of the power limit."""
    return (
        row.op,
        row.stage,
        row.case,
        row.provider,
        row.dtype,
        row.scale,
        row.accumulate,
        row.routing,
        row.num_tokens,
        row.layout,
        row.batch_invariant,
    )


def latest(rows: Iterable[Row]) -> list[Row]:
    """Keep the last row of each measurement, so that files can be appended to or joined."""
    return list({(*measurement(row), row.power): row for row in rows}.values())


def in_regime(rows: Iterable[Row], power: str = BURST) -> list[Row]:
    """Return the rows of a regime, one per measurement; rows of no regime stand in for bursts that
    are missing."""
    kept = latest(rows)
    chosen = {measurement(row): row for row in kept if row.power == power}
    if power == BURST:
        chosen = {measurement(row): row for row in kept if row.power == MIXED} | chosen
    return list(chosen.values())
