"""Markdown tables made from result rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.files import FileError, text_of
from bench.layouts import CONTIGUOUS
from bench.lookup import DEFAULT_ACCUMULATE, ROUTING, Results, main_scale
from bench.ops import PAIR
from bench.peers import PeerTimes
from bench.rows import Row, in_regime, latest

SERIES = (("bf16", "fp32"), ("fp8", "promoted"), ("fp8", "fast"))
README_TOKENS = (1, 4, 16, 64, 256, 1024, 8192)
TITLES = {
    ("bf16", "fp32"): "BF16",
    ("fp8", "promoted"): "FP8, per-tensor scales, promoted accumulation (default)",
    ("fp8", "fast"): "FP8, per-tensor scales, fast accumulation",
}
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def pair_rows(
    rows: Sequence[Row], *, all_scales: bool = False, layout: str = CONTIGUOUS
) -> list[Row]:
    """Return the pair rows that have a time, one per measurement, in bursts, with the scales in
    which providers are compared or with all, and with one layout of the activations."""
    return [
        row
        for row in timed_rows(rows, PAIR)
        if row.layout == layout and (all_scales or row.scale == main_scale(row.provider, row.dtype))
    ]


def timed_rows(rows: Sequence[Row], op: str) -> list[Row]:
    """Return the rows of an op that have a time, one per measurement, in bursts."""
    return [
        row
        for row in in_regime(rows)
        if row.op == op and row.routing == ROUTING and row.median_us is not None
    ]


def cases_and_tokens(rows: Sequence[Row]) -> tuple[list[str], list[int]]:
    """Return the cases in order of appearance and the token counts, ascending."""
    return list(dict.fromkeys(row.case for row in rows)), sorted({row.num_tokens for row in rows})


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in body)])


def provenance(rows: Sequence[Row]) -> str:
    """Return where the rows come from, in one line."""
    values = [
        ", ".join(sorted({str(getattr(row, name)) for row in rows}))
        for name in ("device", "torch", "cuda", "commit", "routing", "power")
    ]
    device, torch, cuda, commit, routing, power = values
    return (
        f"{device}; torch {torch}; CUDA {cuda}; commit {commit}; routing {routing}; power {power}."
    )


def time_tables(rows: Sequence[Row]) -> str:
    """Return one table per dtype and accumulation: median us, ratio to the floor, TFLOP/s."""
    sections = []
    for dtype, accumulate in SERIES:
        own = [
            row
            for row in pair_rows(rows)
            if row.provider == "moe_ext" and (row.dtype, row.accumulate) == (dtype, accumulate)
        ]
        if not own:
            continue
        sections.append(f"### {TITLES[dtype, accumulate]}\n\n{time_table(own)}")
    legend = "Each cell: median us / ratio to the floor / TFLOP/s. T counts tokens before top-k."
    return "\n\n".join([legend, *sections])


def time_table(rows: Sequence[Row]) -> str:
    """Return the times of rows that differ in case and tokens alone."""
    cases, tokens = cases_and_tokens(rows)
    by_cell = {(row.case, row.num_tokens): row for row in rows}
    body = [[case, *(_time_cell(by_cell.get((case, t))) for t in tokens)] for case in cases]
    return markdown_table(["case", *(f"T={t}" for t in tokens)], body)


def _time_cell(row: Row | None) -> str:
    if row is None or row.median_us is None:
        return "-"
    return f"{row.median_us:.1f} / {row.ratio_to_floor:.2f} / {row.tflops:.0f}"


def comparison_tables(rows: Sequence[Row], peers: PeerTimes) -> str:
    """Return the speed-up over torch (same file) and over DeepGEMM (the peers' file)."""
    results, pairs = Results(rows), pair_rows(rows)
    cases, tokens = cases_and_tokens(pairs)
    sections = []
    for dtype in ("bf16", "fp8"):
        body = []
        for case in cases:
            for name in ("torch", "DeepGEMM"):
                cells = []
                for t in tokens:
                    own = results.moe_ext(case, dtype, t)
                    torch_us, peer_us = (
                        results.torch_us(case, dtype, t),
                        peers.get((case, dtype, t)),
                    )
                    cells.append(speedup(own, torch_us if name == "torch" else peer_us))
                if any(cell != "-" for cell in cells):
                    body.append([case, name, *cells])
        if body:
            header = ["case", "against", *(f"T={t}" for t in tokens)]
            title = TITLES[dtype, DEFAULT_ACCUMULATE[dtype]]
            sections.append(f"### {title}\n\n{markdown_table(header, body)}")
    legend = (
        "Each cell: the other's time over ours, and its median us. torch is `grouped_mm` in BF16 "
        "and `scaled_grouped_mm` (row-wise scales, fast accumulation) in FP8, same run; DeepGEMM "
        "is the better of its contiguous and masked kernels, in FP8 with block scales, measured on "
        "another card of the same kind (`bench/data/README.md`)."
    )
    return "\n\n".join([legend, *sections])


def speedup(own: Row | None, other_us: float | None) -> str:
    """Return the other's time over a row's, and the other's time."""
    if own is None or own.median_us is None or other_us is None:
        return "-"
    return f"{other_us / own.median_us:.2f}x ({other_us:.1f})"


def speedup_lines(
    case: str, ours: Sequence[Row | None], others: Mapping[str, Sequence[float | None]]
) -> list[list[str]]:
    """Return a line of a table for each of the others that has a time, beside our rows."""
    return [
        [case, name, *(speedup(own, time) for own, time in zip(ours, times, strict=True))]
        for name, times in others.items()
        if any(time is not None for time in times)
    ]


def skipped_list(rows: Sequence[Row]) -> str:
    """Return what was skipped and why, one line per provider, dtype, case and reason."""
    lines = {
        f"- {row.provider} {row.dtype} {row.case}"
        f"{'' if row.layout == CONTIGUOUS else f' {row.layout}'}: {row.skipped_reason}"
        for row in latest(rows)
        if row.skipped_reason
    }
    return "\n".join(sorted(lines)) or "Nothing was skipped."


def readme_section(rows: Sequence[Row]) -> str:
    """Return the compact table of the README: ratio to the floor, prefill rate, against torch."""
    results, pairs = Results(rows), pair_rows(rows)
    cases, tokens = cases_and_tokens([row for row in pairs if row.provider == "moe_ext"])
    shown = [t for t in README_TOKENS if t in tokens]
    body = []
    for case in cases:
        for dtype in ("bf16", "fp8"):
            found = {t: results.moe_ext(case, dtype, t) for t in tokens}
            if not any(found.values()):
                continue
            cells = [f"{row.ratio_to_floor:.2f}" if (row := found[t]) else "-" for t in shown]
            last = found[tokens[-1]]
            rate = f"{last.tflops:.0f}" if last is not None else "-"
            gains = [
                other / row.median_us
                for t, row in found.items()
                if row is not None
                and row.median_us is not None
                and (other := results.torch_us(case, dtype, t)) is not None
            ]
            body.append([case, dtype.upper(), *cells, rate, gain(gains)])
    last_tokens = tokens[-1] if tokens else 0
    header = [
        "case",
        "dtype",
        *(f"T={t}" for t in shown),
        f"TFLOP/s at {last_tokens}",
        "speed-up over torch",
    ]
    legend = (
        "Time of the two GEMMs of a layer over the floor (weights at 4.5 TB/s or operations at the "
        "dense rate, plus 2 us); cold weights, CUDA-graph replay; FP8 with per-tensor scales and "
        "promoted accumulation. Speed-up: geometric mean over T (least) of torch's time over ours. "
        f"{provenance(pairs)}"
    )
    return f"{legend}\n\n{markdown_table(header, body)}"


def gain(gains: Sequence[float]) -> str:
    """Return the geometric mean of speed-ups, and the least."""
    if not gains:
        return "-"
    mean = math.exp(sum(math.log(gain) for gain in gains) / len(gains))
    return f"{mean:.1f}x ({min(gains):.1f}x)"


def replace_section(text: str, section: str, first_mark: str = BEGIN, last_mark: str = END) -> str:
    """Return `text` with what stands between the marks replaced by `section`."""
    before, begin, rest = text.partition(first_mark)
    _, end, after = rest.partition(last_mark)
    if not begin or not end:
        raise ValueError(
            f"replace_section: `text` must hold {first_mark} and {last_mark}, got neither or one"
        )
    return f"{before}{first_mark}\n{section}\n{last_mark}{after}"


def rewrite_section(path: Path, section: str, first_mark: str, last_mark: str) -> None:
    """Put `section` between the marks of a file."""
    text = text_of(path)
    try:
        rewritten = replace_section(text, section, first_mark, last_mark)
    except ValueError:  # the only one it has: no marks
        raise FileError(f"{path} must hold {first_mark} and {last_mark}, got not both") from None
    path.write_text(rewritten)
