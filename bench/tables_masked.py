"""Markdown tables of rows in the masked layout."""

from __future__ import annotations

from collections.abc import Sequence

from bench.layouts import MASKED
from bench.lookup import Results, time_us
from bench.peers import PeerTimes
from bench.rows import Row
from bench.tables import (
    cases_and_tokens,
    markdown_table,
    pair_rows,
    speedup_lines,
    time_table,
)


def masked_tables(rows: Sequence[Row], peers: PeerTimes) -> str:
    """Return times, and speed-ups over other GEMMs and the contiguous layout; empty without rows.

    Args:
        rows: Result rows.
        peers: Times of masked GEMMs of other libraries, measured elsewhere.
    """
    own = [
        row for row in pair_rows(rows, all_scales=True, layout=MASKED) if row.provider == "moe_ext"
    ]
    if not own:
        return ""
    sections = []
    for dtype, scale, accumulate in dict.fromkeys(
        (row.dtype, row.scale, row.accumulate) for row in own
    ):
        group = [
            row
            for row in own
            if (row.dtype, row.scale, row.accumulate) == (dtype, scale, accumulate)
        ]
        title = "BF16" if dtype == "bf16" else f"FP8, scales {scale}, {accumulate} accumulation"
        sections.append(f"### {title}\n\n{time_table(group)}")
        if comparison := _comparison(rows, group, peers):
            sections.append(comparison)
    legend = (
        "A buffer for each expert, as long as the largest group of any draw rounded up to 64 rows; "
        "the kernel is chosen by the mean group. First tables: median us / ratio to the floor / "
        "TFLOP/s. Second tables: the other's time over ours, and its median us. Contiguous: the "
        "same GEMMs without buffers, this library. DeepGEMM: its masked kernels, in the same run "
        "or measured on another card of the same kind (`bench/data/README.md`)."
    )
    return "\n\n".join([legend, *sections])


def _comparison(rows: Sequence[Row], group: Sequence[Row], peers: PeerTimes) -> str:
    """Return the table of one dtype, kind of scales and accumulation; empty without others."""
    first = group[0]
    dtype, scale, accumulate = first.dtype, first.scale, first.accumulate
    contiguous, masked = Results(rows), Results(rows, layout=MASKED)
    cases, tokens = cases_and_tokens(group)
    # The peers' FP8 times are with scales per block.
    comparable = scale in ("none", "block128")
    body = []
    for case in cases:
        others = {
            "contiguous": [
                time_us(
                    contiguous.get("moe_ext", case, dtype, t, scale=scale, accumulate=accumulate)
                )
                for t in tokens
            ],
            "DeepGEMM, same run": [
                time_us(masked.get("deep_gemm", case, dtype, t)) if comparable else None
                for t in tokens
            ],
            "DeepGEMM": [peers.get((case, dtype, t)) if comparable else None for t in tokens],
        }
        ours = [
            masked.get("moe_ext", case, dtype, t, scale=scale, accumulate=accumulate)
            for t in tokens
        ]
        body += speedup_lines(case, ours, others)
    if not body:
        return ""
    return markdown_table(["case", "against", *(f"T={t}" for t in tokens)], body)
