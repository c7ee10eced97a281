"""One measurement of accuracy as a row of a JSONL file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.files import read_rows


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
    return read_rows(path, lambda columns: AccuracyRow(**columns), "rows of bench.accuracy")
