"""Markdown tables of whole layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.lookup import Results, time_us
from bench.ops import LAYER
from bench.peers import PeerTimes
from bench.rows import Row
from bench.tables import (
    cases_and_tokens,
    gain,
    markdown_table,
    provenance,
    speedup_lines,
    time_table,
    timed_rows,
)

LAYER_BEGIN, LAYER_END = "<!-- bench-layer:begin -->", "<!-- bench-layer:end -->"
README_FEW_TOKENS = (1, 16, 256)


def layer_tables(rows: Sequence[Row], peers: Mapping[str, PeerTimes]) -> str:
    """Return times of each kind of scales and speed-ups over others; empty without rows.

    Args:
        rows: Result rows.
        peers: Kind of scales -> best times of other libraries' layers, measured elsewhere.
    """
    own = [
        row
        for row in timed_rows(rows, LAYER)
        if row.provider == "moe_ext" and not row.batch_invariant
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
        if comparison := _comparison(rows, group, peers.get(scale, {})):
            sections.append(comparison)
    legend = (
        "From hidden states and ids to the output. First tables: median us / ratio to the floor / "
        "TFLOP/s of the two GEMMs. Second tables: the other's time over ours, and its median us. "
        "Batch-invariant: this library in that mode. torch: sort, index, two `grouped_mm` and "
        "`index_add_`, same run. Best peer: the fastest layer with such scales, measured on "
        "another card of the same kind (`bench/data/README.md`)."
    )
    return "\n\n".join([legend, *sections])


def layer_readme_section(rows: Sequence[Row], peers: Mapping[str, PeerTimes]) -> str:
    """Return the compact table of the README: times at few tokens, and against the best peer.

    Args:
        rows: Result rows.
        peers: Kind of scales -> best times of other libraries' layers, measured elsewhere.
    """
    own = [
        row
        for row in timed_rows(rows, LAYER)
        if row.provider == "moe_ext" and not row.batch_invariant and row.accumulate != "fast"
    ]
    cases, _ = cases_and_tokens(own)
    kinds = list(dict.fromkeys((row.dtype, row.scale) for row in own))
    body = []
    for case in cases:
        cells = []
        for dtype, scale in kinds:
            ours = {
                row.num_tokens: row.median_us
                for row in own
                if (row.case, row.dtype, row.scale) == (case, dtype, scale)
            }
            theirs = peers.get(scale, {})
            gains = [
                other / us
                for t, us in ours.items()
                if us is not None and (other := theirs.get((case, dtype, t))) is not None
            ]
            few = " / ".join(f"{us:.0f}" if (us := ours.get(t)) else "-" for t in README_FEW_TOKENS)
            cells.append(f"{few} us, {gain(gains)}" if gains else f"{few} us")
        body.append([case, *cells])
    header = ["case", *("BF16" if dtype == "bf16" else f"FP8 {scale}" for dtype, scale in kinds)]
    legend = (
        "A whole layer, from hidden states and ids to the output: time at T = "
        f"{', '.join(map(str, README_FEW_TOKENS))}; then the best peer's time over ours, geometric "
        "mean over T = 1 to 8192 (least), where a peer was measured, on another card of the same "
        f"kind. {provenance(own)}"
    )
    return f"{legend}\n\n{markdown_table(header, body)}"


def _comparison(rows: Sequence[Row], group: Sequence[Row], peers: PeerTimes) -> str:
    """Return the table of one dtype, kind of scales and accumulation; empty without others."""
    first = group[0]
    dtype, scale, accumulate = first.dtype, first.scale, first.accumulate
    usual, invariant = (Results(rows, op=LAYER, batch_invariant=mode) for mode in (False, True))
    cases, tokens = cases_and_tokens(group)

    def ours(results: Results, case: str) -> list[Row | None]:
        return [
            results.get("moe_ext", case, dtype, t, scale=scale, accumulate=accumulate)
            for t in tokens
        ]

    body = []
    for case in cases:
        others = {
            "batch-invariant": [time_us(row) for row in ours(invariant, case)],
            "torch": [usual.torch_us(case, dtype, t) if dtype == "bf16" else None for t in tokens],
            "best peer": [peers.get((case, dtype, t)) for t in tokens],
        }
        body += speedup_lines(case, ours(usual, case), others)
    if not body:
        return ""
    return markdown_table(["case", "against", *(f"T={t}" for t in tokens)], body)
