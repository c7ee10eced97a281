"""Markdown tables of FP8 rows whose scales are not per tensor."""

from __future__ import annotations

from collections.abc import Sequence

from bench.lookup import Results, main_scale, time_us
from bench.peers import PeerTimes
from bench.rows import Row
from bench.scales import SCALES
from bench.tables import (
    cases_and_tokens,
    markdown_table,
    pair_rows,
    speedup_lines,
    time_table,
)

BLOCK = "block128"


def layout_tables(rows: Sequence[Row]) -> str:
    """Return one table per layout and accumulation that is not the main one; empty without rows."""
    own = [
        row
        for row in pair_rows(rows, all_scales=True)
        if row.provider == "moe_ext" and row.scale != main_scale(row.provider, row.dtype)
    ]
    sections = []
    for scale in SCALES:
        for accumulate in ("promoted", "fast"):
            group = [row for row in own if (row.scale, row.accumulate) == (scale, accumulate)]
            if group:
                title = f"FP8, scales {scale}, {accumulate} accumulation"
                sections.append(f"### {title}\n\n{time_table(group)}")
    if not sections:
        return ""
    legend = (
        "Each cell: median us / ratio to the floor / TFLOP/s. Layouts are those of `--scales`: one "
        "word for both operands, or activations _x_ weights."
    )
    return "\n\n".join([legend, *sections])


def block_comparison(rows: Sequence[Row], peers: PeerTimes) -> str:
    """Return the speed-up of block-scaled rows over others; empty without rows.

    Args:
        rows: Result rows.
        peers: Best time of block-scaled GEMMs of other libraries, measured elsewhere.
    """
    own = [
        row
        for row in pair_rows(rows, all_scales=True)
        if row.provider == "moe_ext" and row.scale == BLOCK
    ]
    if not own:
        return ""
    results = Results(rows)
    cases, tokens = cases_and_tokens(own)
    body = []
    for case in cases:
        others = {
            "per tensor": [time_us(results.moe_ext(case, "fp8", t)) for t in tokens],
            "DeepGEMM, same run": [
                time_us(results.get("deep_gemm", case, "fp8", t)) for t in tokens
            ],
            "best peer": [peers.get((case, "fp8", t)) for t in tokens],
        }
        ours = [results.moe_ext(case, "fp8", t, scale=BLOCK) for t in tokens]
        body += speedup_lines(case, ours, others)
    legend = (
        "Each cell: the other's time over ours with scales per block, and the other's median us. "
        "Per tensor: this library in the same run. Best peer: the fastest of DeepGEMM (contiguous, "
        "masked) and SGLang's CUTLASS GEMM, measured on another card of the same kind "
        "(`bench/data/README.md`)."
    )
    return f"{legend}\n\n{markdown_table(['case', 'against', *(f'T={t}' for t in tokens)], body)}"
