"""One measurement as a row of a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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

    def to_json(self) -> str:
        """Return the row as one line of JSON."""
        return json.dumps(asdict(self))


def load_rows(path: Path) -> list[Row]:
    """Read a JSONL file written by `bench.run` or `bench.tune`, this version or an older one."""
    with path.open() as file:
        return [Row(**json.loads(line)) for line in file if line.strip()]


def latest(rows: Iterable[Row]) -> list[Row]:
    """Keep the last row of each measurement, so that files can be appended to or joined."""
    keep = {
        (
            r.op,
            r.stage,
            r.case,
            r.provider,
            r.dtype,
            r.scale,
            r.accumulate,
            r.routing,
            r.num_tokens,
            r.power,
        ): r
        for r in rows
    }
    return list(keep.values())


def in_regime(rows: Iterable[Row], power: str = BURST) -> list[Row]:
    """Return the rows of a regime, one per measurement; rows of no regime stand in for bursts that
    are missing."""
    kept = latest(rows)
    if power != BURST:
        return [row for row in kept if row.power == power]
    older = [replace(row, power=BURST) for row in kept if row.power == MIXED]
    return latest([*older, *(row for row in kept if row.power == BURST)])


def is_main_layout(row: Row) -> bool:
    """Whether the row's scales are those that providers are compared in: per tensor here, per row
    and channel in PyTorch."""
    return row.provider != "moe_ext" or row.scale in ("none", "tensor")
