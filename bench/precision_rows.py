"""One run of calibration and planning as a row of a JSONL file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

OP = "precision_plan"


@dataclass(frozen=True)
class ChoiceRow:
    """One stage that a plan has in BF16, as calibration saw it."""

    expert: int
    stage: str
    planted: bool
    rows: int
    snr_db: float
    worst: float
    output_max: float
    kurtosis: float
    max_over_rms: float
    extra_bytes: int
    removed: float


@dataclass(frozen=True)
class PrecisionRow:
    """Columns are described in README.md."""

    op: str
    case: str
    data: str
    seed: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_tokens: int
    super_experts: int
    scales: str
    byte_budget: float
    found_all: bool
    found_first: bool
    error_uniform_fp8: float
    error_planned: float
    error_bf16: float
    predicted_uniform_fp8: float
    predicted_planned: float
    gap: float
    fp8_bytes: int
    extra_bytes: int
    output_max_over_median: float
    calibrate_s: float
    choices: tuple[ChoiceRow, ...]
    device: str
    torch: str
    commit: str

    def to_json(self) -> str:
        """Return the row as one line of JSON."""
        return json.dumps(asdict(self))


def load_precision_rows(path: Path) -> list[PrecisionRow]:
    """Read a JSONL file written by `bench.precision_plan`."""
    rows = []
    for line in path.read_text().splitlines():
        values = json.loads(line)
        values["choices"] = tuple(ChoiceRow(**choice) for choice in values["choices"])
        rows.append(PrecisionRow(**values))
    return rows


def latest_rows(rows: list[PrecisionRow]) -> list[PrecisionRow]:
    """Keep the last row of each run."""
    keys = ("case", "data", "scales", "byte_budget", "num_tokens", "seed")
    assert set(keys) < {field.name for field in fields(PrecisionRow)}
    return list({tuple(getattr(row, key) for key in keys): row for row in rows}.values())
