"""Rows of the benchmark that tests make up, and files of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.rows import Row


def make_row(**changes: object) -> Row:
    row = Row(
        op="grouped_gemm_pair",
        stage="",
        case="mixtral",
        provider="moe_ext",
        dtype="bf16",
        scale="none",
        accumulate="fp32",
        routing="zipf0.6",
        num_tokens=16,
        active_experts=7.7,
        max_rows=9,
        config="swap+swap",
        median_us=620.0,
        p10_us=619.0,
        p90_us=622.0,
        floor_us=600.0,
        ratio_to_floor=1.0333,
        traffic_floor_us=601.0,
        tflops=18.2,
        gbps=4300.0,
        max_err=3e-3,
        num_samples=20,
        skipped_reason="",
        device="NVIDIA H200",
        torch="2.11.0+cu130",
        cuda="13.0",
        commit="abc123",
        power="burst",
    )
    return replace(row, **changes)  # type: ignore[arg-type]


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(row.to_json() + "\n" for row in rows))
    return path
