"""Rows of `bench.mixed` and the bars that they are held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.files import read_rows
from bench.rows import Row
from bench.verdicts import PREFILL_TOKENS, Bar

OP = "fused_moe_mixed"
FEW, HALF = "few", "half"
# Of the ratio to the own floor over that of uniform FP8 to its own.
FEW_RATIO, FEW_RATIO_PREFILL = 1.06, 1.04
# Of the mean of the two uniform times, weighted by how many bytes are in which precision.
HALF_RATIO = 1.03


@dataclass(frozen=True)
class MixedRow(Row):
    """A mixture, and what its layer takes in one precision, timed in the same run."""

    mixture: str = ""
    bf16_share: float = 0.0  # of the experts
    bf16_bytes_share: float = 0.0  # of what FP8 to BF16 adds in bytes that are read
    uniform_fp8_us: float | None = None
    uniform_bf16_us: float | None = None
    uniform_fp8_ratio_to_floor: float | None = None


def load_mixed_rows(path: Path) -> list[MixedRow]:
    """Read a JSONL file written by `bench.mixed`, the last row of each measurement."""
    rows = read_rows(path, lambda columns: MixedRow(**columns), "rows of bench.mixed")
    keys = [(row.case, row.mixture, row.scale, row.routing, row.num_tokens) for row in rows]
    return list(dict(zip(keys, rows, strict=True)).values())


def bars(rows: Sequence[MixedRow]) -> list[Bar]:
    """Evaluate the bars of mixtures."""
    found = []
    for row in rows:
        cell = f"{row.case} T={row.num_tokens}"
        name = "few in BF16" if row.mixture == FEW else "half in BF16"
        fp8, bf16, own = row.uniform_fp8_us, row.uniform_bf16_us, row.median_us
        ratio, like = row.ratio_to_floor, row.uniform_fp8_ratio_to_floor
        if None in (fp8, bf16, own, ratio, like):
            found.append(Bar(name, cell, None, row.skipped_reason or "no time"))
            continue
        assert fp8 is not None and bf16 is not None and own is not None  # noqa: PT018
        assert ratio is not None and like is not None  # noqa: PT018
        if row.mixture == FEW:
            limit = FEW_RATIO_PREFILL if row.num_tokens >= PREFILL_TOKENS else FEW_RATIO
            passed = ratio <= limit * like
            numbers = (
                f"{own:.1f} us, FP8 {fp8:.1f}: {ratio:.3f} of the floor over {like:.3f} is "
                f"{ratio / like:.3f} <= {limit}"
            )
        else:
            mean = fp8 + (bf16 - fp8) * row.bf16_bytes_share
            passed = own <= HALF_RATIO * mean
            numbers = (
                f"{own:.1f} us over {mean:.1f} (FP8 {fp8:.1f}, BF16 {bf16:.1f}) is "
                f"{own / mean:.3f} <= {HALF_RATIO}"
            )
        found.append(Bar(name, cell, passed, numbers))
    return found
