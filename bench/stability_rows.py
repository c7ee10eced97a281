"""Rows of `bench.stability`, as lines of a JSONL file of their own; columns are in README.md."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.files import read_rows

SingleCall = tuple[int, float, float, float]
"""num_tokens, wall_us, device_us, floor_us."""


@dataclass(frozen=True)
class StabilityRow:
    """Eager calls of a layer, none like another; None where nothing was measured."""

    op: str
    provider: str
    case: str
    dtype: str
    scale: str
    routing: str
    num_tokens: int | None
    num_calls: int
    preload: bool
    device: str
    torch: str
    cuda: str
    commit: str
    p50_us: float | None = None
    p99_us: float | None = None
    p999_us: float | None = None
    max_us: float | None = None
    ratio_p50: float | None = None
    ratio_p99: float | None = None
    ratio_p999: float | None = None
    ratio_max: float | None = None
    device_p50_us: float | None = None
    device_p99_us: float | None = None
    device_p999_us: float | None = None
    device_max_us: float | None = None
    device_ratio_p50: float | None = None
    device_ratio_p99: float | None = None
    device_ratio_p999: float | None = None
    device_ratio_max: float | None = None
    slowest_over_predicted: float | None = None
    first_call_ms: float | None = None
    compilations: int | None = None
    modules_loaded_late: int | None = None
    late_mib: float | None = None
    skipped_reason: str = ""
    calls: tuple[SingleCall, ...] = ()


@dataclass(frozen=True)
class PreloadRow:
    """`moe_ext.preload` in a fresh process, and the first call of a layer behind it."""

    op: str
    ms: float
    mib: float
    num_kernels: int
    case: str
    dtype: str
    scale: str
    num_tokens: int
    first_call_ms: float
    median_ms: float
    first_call_without_ms: float
    device: str
    torch: str
    cuda: str
    commit: str


@dataclass(frozen=True)
class DispatchHostRow:
    """Microseconds of the dispatcher's choice."""

    op: str
    met_before: bool
    us: float
    max_us: float
    num_problems: int
    device: str
    torch: str
    cuda: str
    commit: str


StabilityKind = StabilityRow | PreloadRow | DispatchHostRow
_KINDS: dict[str, type[StabilityKind]] = {
    "stability": StabilityRow,
    "preload": PreloadRow,
    "dispatch_host": DispatchHostRow,
}


def to_json(row: StabilityKind) -> str:
    """Return a row as one line of JSON."""
    return json.dumps(asdict(row))


def load_stability_rows(path: Path) -> list[StabilityKind]:
    """Read a JSONL file written by `bench.stability`."""
    return read_rows(path, _parse, "rows of bench.stability")


def _parse(values: dict[str, Any]) -> StabilityKind:
    if "calls" in values:
        values["calls"] = tuple(tuple(call) for call in values["calls"])
    return _KINDS[values["op"]](**values)


def latest_rows(rows: Iterable[StabilityKind]) -> list[StabilityKind]:
    """Keep the last row of each measurement."""
    names = ("op", "provider", "case", "dtype", "scale", "routing", "num_tokens", "preload")
    kept: dict[tuple[Any, ...], StabilityKind] = {}
    for row in rows:
        key = (*(getattr(row, name, None) for name in names), getattr(row, "met_before", None))
        kept[key] = row
    return list(kept.values())
