"""One measurement as a row of a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


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

    def to_json(self) -> str:
        """Return the row as one line of JSON."""
        return json.dumps(asdict(self))


def load_rows(path: Path) -> list[Row]:
    """Read a JSONL file written by `bench.run` or `bench.tune`."""
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
        ): r
        for r in rows
    }
    return list(keep.values())


def is_main_layout(row: Row) -> bool:
    """Whether the row's scales are those that providers are compared in: per tensor here, per row
    and channel in PyTorch."""
    return row.provider != "moe_ext" or row.scale in ("none", "tensor")
