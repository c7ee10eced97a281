"""One conversion of a checkpoint as a row of a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.files import read_rows

OP = "convert"
MIN_MB_PER_S = 500.0
BAR_LAYERS = 2
"""Layers whose bytes the memory of a conversion must stay below."""


@dataclass(frozen=True)
class ConvertRow:
    """Columns are described in README.md."""

    op: str
    case: str
    num_layers: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    scales: str
    bf16_share: float
    workers: int
    cpus: int
    input_bytes: int
    output_bytes: int
    layer_bytes: int
    seconds: tuple[float, ...]
    mb_per_s: float
    peak_mib: float
    load: float
    where: str
    device: str
    torch: str
    commit: str

    def to_json(self) -> str:
        """Return the row as one line of JSON."""
        return json.dumps(asdict(self))


def load_convert_rows(path: Path) -> list[ConvertRow]:
    """Read a JSONL file written by `bench.convert`."""
    return read_rows(
        path,
        lambda columns: ConvertRow(**{**columns, "seconds": tuple(columns["seconds"])}),
        "rows of bench.convert",
    )


def misses(rows: Sequence[ConvertRow]) -> list[str]:
    """Say every bar that a row misses."""
    missed = []
    for row in rows:
        name = f"{row.case} {row.scales}, {row.workers} workers"
        most = BAR_LAYERS * row.layer_bytes / 2**20
        if row.mb_per_s < MIN_MB_PER_S:
            missed.append(f"{name}: {row.mb_per_s:.0f} MB/s of {MIN_MB_PER_S:.0f}")
        if row.peak_mib >= most:
            missed.append(f"{name}: {row.peak_mib:.0f} MiB of {most:.0f}")
    return missed
