"""One number of a whole model as a row of a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.files import read_rows

OP = "e2e_transformers"
TTFT, DECODE = "ttft_ms", "decode_tokens_per_s"
METRICS = (TTFT, DECODE)
MODEL = "qwen3-30b-a3b"
"""The model that is measured but for a dry run."""


@dataclass(frozen=True)
class E2ERow:
    """Columns are described in README.md; `None` where nothing was measured."""

    op: str
    model: str
    dtype: str
    implementation: str
    metric: str
    batch: int
    prompt_tokens: int
    value: float | None
    call_ms: float | None
    experts_share: float | None
    captured: bool
    num_samples: int
    max_err: float | None
    skipped_reason: str
    device: str
    torch: str
    transformers: str
    commit: str

    def to_json(self) -> str:
        """Return the row as one line of JSON."""
        return json.dumps(asdict(self))


Key = tuple[str, str, str, str, int, int]


def key_of(row: E2ERow) -> Key:
    """Return what tells measurements apart."""
    return (row.model, row.dtype, row.implementation, row.metric, row.batch, row.prompt_tokens)


def load_e2e_rows(path: Path) -> list[E2ERow]:
    """Read a JSONL file written by `bench.e2e_transformers`."""
    return read_rows(path, lambda columns: E2ERow(**columns), "rows of bench.e2e_transformers")


def latest_rows(rows: Iterable[E2ERow]) -> list[E2ERow]:
    """Keep the last row of each measurement, but none without a value behind one that has it."""
    kept: dict[Key, E2ERow] = {}
    for row in rows:
        key = key_of(row)
        if row.value is not None or key not in kept or kept[key].value is None:
            kept[key] = row
    return list(kept.values())
