"""Turn result rows into tables, a plot and verdicts: `python -m bench.report results.jsonl`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench import bars, bars_fp8, bars_layer, bars_masked
from bench.files import refused_in_a_line
from bench.layouts import CONTIGUOUS, MASKED
from bench.ops import GEMM, LAYER, PAIR
from bench.peers import PEERS_CSV, Peers, load_peers
from bench.power import SUSTAINED
from bench.rows import Row, in_regime, latest, load_rows
from bench.tables import (
    BEGIN,
    END,
    comparison_tables,
    pair_rows,
    provenance,
    readme_section,
    rewrite_section,
    skipped_list,
    time_tables,
    timed_rows,
)
from bench.tables_fp8 import block_comparison, layout_tables
from bench.tables_layer import LAYER_BEGIN, LAYER_END, layer_readme_section, layer_tables
from bench.tables_masked import masked_tables
from bench.tables_power import power_table
from bench.verdicts import format_bars

LOSS = 1.03


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of `bench.report`."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    add = parser.add_argument
    add("results", type=Path, nargs="+", help="JSONL files; a later row replaces an earlier one")
    add("--peers", type=Path, default=PEERS_CSV, help="CSV with the peers' measurements")
    add("--markdown", type=Path, help="write tables here")
    add("--plot", type=Path, help="write a PNG here; needs matplotlib")
    add("--readme", type=Path, help="rewrite the marked section of this file: pairs of GEMMs")
    add("--layer-readme", type=Path, help="rewrite the marked section of this file: whole layers")
    add("--check", action="store_true", help="evaluate the speed bars; exit 1 unless all pass")
    add("--misses", action="store_true", help="with --check: print only what did not pass")
    add("--compare", type=Path, help="list what lost over 3 %% against this JSONL; exit 1 if any")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what was asked for; returns 1 when a check or a comparison fails."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    with refused_in_a_line(parser):
        return _report(args)


def _report(args: argparse.Namespace) -> int:
    rows = latest(row for path in args.results for row in load_rows(path))
    peers = load_peers(args.peers)
    failed = False
    if args.markdown is not None:
        args.markdown.write_text(markdown(rows, peers))
    if args.plot is not None:
        # Only here, so that every other output works without matplotlib.
        from bench.plot import plot

        plot(rows, args.plot)
    if args.readme is not None:
        rewrite_section(args.readme, readme_section(rows), BEGIN, END)
    if args.layer_readme is not None:
        section = layer_readme_section(rows, peers.layers)
        rewrite_section(args.layer_readme, section, LAYER_BEGIN, LAYER_END)
    if args.check:
        verdicts = [
            *(bars.evaluate(rows, peers.deep_gemm) if _has_gemms(rows) else ()),
            *bars_fp8.evaluate(rows, peers.block_scaled),
            *bars_masked.evaluate(rows, peers.masked),
            *bars_layer.evaluate(rows, peers.layers),
        ]
        print(format_bars(verdicts, verbose=not args.misses))
        failed |= any(verdict.passed is not True for verdict in verdicts)
    if args.compare is not None:
        losses = lost_cells(load_rows(args.compare), rows)
        print("\n".join([*losses, f"{len(losses)} cells lost more than {LOSS - 1:.0%}"]))
        failed |= bool(losses)
    return 1 if failed else 0


def _has_gemms(rows: Sequence[Row]) -> bool:
    """Return whether the bars of the first release are meant: not with rows of layers alone."""
    return not rows or any(row.op in (PAIR, GEMM) for row in rows)


def markdown(rows: Sequence[Row], peers: Peers) -> str:
    """Return the report; a section without rows is left out."""
    shown = (
        pair_rows(rows)
        or pair_rows(rows, all_scales=True)
        or pair_rows(rows, all_scales=True, layout=MASKED)
        or timed_rows(rows, LAYER)
    )
    sections = {
        "Times": time_tables(rows) if _has_gemms(rows) else "",
        "Comparison": comparison_tables(rows, peers.deep_gemm) if _has_gemms(rows) else "",
        "FP8 with other scales": layout_tables(rows),
        "Scales per block against others": block_comparison(rows, peers.block_scaled),
        "Masked layout": masked_tables(rows, peers.masked),
        "Whole layer": layer_tables(rows, peers.layers),
        "Burst and sustained": power_table(rows),
        "Skipped": skipped_list(rows),
    }
    parts = [f"## {title}\n\n{text}\n" for title, text in sections.items() if text]
    return "\n".join(
        [
            f"# Benchmark results\n\n{provenance(shown)}\nMethod and columns: `bench/README.md`.\n",
            *parts,
        ]
    )


def lost_cells(old_rows: Sequence[Row], new_rows: Sequence[Row]) -> list[str]:
    """Return one line per measurement that is more than 3 % slower than before, worst first.

    Rows of bursts are compared with older ones of no regime, sustained ones with sustained ones.
    """

    def times(rows: Sequence[Row]) -> dict[str, float]:
        return {
            _name(row): row.median_us
            for row in (*in_regime(rows), *in_regime(rows, SUSTAINED))
            if row.median_us is not None
        }

    old, new = times(old_rows), times(new_rows)
    losses = {name: new[name] / old[name] for name in new if name in old}
    return [
        f"{name}: {old[name]:.1f} -> {new[name]:.1f} us ({ratio - 1:+.1%})"
        for name, ratio in sorted(losses.items(), key=lambda item: -item[1])
        if ratio > LOSS
    ]


def _name(row: Row) -> str:
    parts = (
        row.op,
        row.stage,
        row.case,
        row.provider,
        row.dtype,
        row.scale if row.dtype == "fp8" else "",
        row.accumulate,
        row.routing,
        "" if row.layout == CONTIGUOUS else row.layout,
        "batch-invariant" if row.batch_invariant else "",
        SUSTAINED if row.power == SUSTAINED else "",
        f"T={row.num_tokens}",
    )
    return " ".join(part for part in parts if part)


if __name__ == "__main__":
    raise SystemExit(main())
