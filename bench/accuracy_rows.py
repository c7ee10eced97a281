"""One measurement of accuracy as a row of a JSONL file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AccuracyRow:
    """Columns are described in README.md."""

    data: str
    dtype: str
    scale: str
    accumulate: str
    num_groups: int
    num_rows: int
    n: int
    k: int
    config: str
    snr_db: float
    difference: float
    max_err: float
    device: str
    torch: str
    cuda: str
    commit: str


def load_accuracy_rows(path: Path) -> list[AccuracyRow]:
    """Read a JSONL file written by `bench.accuracy`."""
    with path.open() as file:
        return [AccuracyRow(**json.loads(line)) for line in file if line.strip()]
