r"""Time a whole model of Transformers with each implementation of its experts.

    python -m bench.e2e_transformers --out e2e.jsonl
    python -m bench.e2e_transformers --read e2e.jsonl --layers layers.jsonl --check \
        --markdown e2e.md --plot e2e.png

Qwen3-30B-A3B with random weights: milliseconds to the first token, tokens per second of a captured
decode step, and the share of the time that the experts have: what a call takes less once every
module of experts returns its input. A run that is started again goes on where its file ends.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import moe_ext
import torch
import transformers
from moe_ext.integrations.transformers import register

from bench.appending import check_appendable, open_to_append
from bench.e2e_bars import evaluate, misses
from bench.e2e_model import SIZES, TINY, make_model, register_stub, to_fp8
from bench.e2e_page import E2E_BEGIN, E2E_END, e2e_readme_section, page
from bench.e2e_plot import plot
from bench.e2e_rows import (
    DECODE,
    METRICS,
    MODEL,
    TTFT,
    E2ERow,
    Key,
    key_of,
    latest_rows,
    load_e2e_rows,
)
from bench.e2e_runner import Cell, Grid, Runner
from bench.e2e_time import POSITION
from bench.files import refused_in_a_line
from bench.measure import Environment
from bench.rows import load_rows
from bench.tables import rewrite_section

DTYPES = ("bf16", "fp8")
# Those whose times are wanted most come first: a run may be cut short.
IMPLEMENTATIONS = ("moe_ext", "grouped_mm", "batched_mm", "deepgemm", "sonicmoe", "eager")


def grid_of(dry_run: bool, samples: int, max_call_seconds: float, metrics: Sequence[str]) -> Grid:
    """Return the cells: decode steps first, as they take the least time."""
    steps: tuple[int, ...] = (1, 2) if dry_run else (1, 8, 64)
    batches = (1, 2) if dry_run else (1, 8)
    prompts: tuple[int, ...] = (8,) if dry_run else (512, 2048, 8192)
    cells = [Cell(DECODE, batch, POSITION) for batch in steps]
    cells += [Cell(TTFT, batch, tokens) for batch in batches for tokens in prompts]
    kept = tuple(cell for cell in cells if cell.metric in metrics)
    return Grid(TINY if dry_run else MODEL, kept, samples, max_call_seconds)


def measure(
    grid: Grid,
    dtypes: Sequence[str],
    implementations: Sequence[str],
    done: set[Key],
    environment: Environment,
    limit_seconds: float,
) -> Iterator[E2ERow]:
    """Yield the rows that are not done yet, until the time is up."""
    begin = time.perf_counter()
    register()
    register_stub()
    model = None
    for dtype in dtypes:
        wanted = {
            implementation: [
                cell
                for cell in grid.cells
                if (grid.model, dtype, implementation, *_columns(cell)) not in done
            ]
            for implementation in implementations
        }
        if not any(wanted.values()):
            continue
        if model is None:
            model = make_model(grid.model, environment.device)
        if dtype == "fp8":
            to_fp8(model, environment.device)
        environment.synchronize()
        print(f"{dtype}: model made after {time.perf_counter() - begin:.0f} s", flush=True)
        runner = Runner(model, dtype, grid, environment)
        for implementation, cells in wanted.items():
            for row in runner.rows(implementation, cells):
                yield row
                if time.perf_counter() - begin > limit_seconds:
                    print(f"stopped after {limit_seconds:g} s; run again to go on", flush=True)
                    return


def _columns(cell: Cell) -> tuple[str, int, int]:
    return cell.metric, cell.batch, cell.prompt_tokens


def _line(row: E2ERow) -> str:
    what = f"{row.dtype} {row.implementation} {row.metric} b{row.batch} {row.prompt_tokens}"
    if row.value is None:
        return f"{what}: skipped: {row.skipped_reason}"
    return f"{what}: {row.value:.1f} (call {row.call_ms:.2f} ms, experts {row.experts_share:.0%})"


def run(options: argparse.Namespace) -> list[E2ERow]:
    """Measure, append rows to the file, return all of them."""
    if options.out is not None:
        check_appendable(options.out)
    rows = load_e2e_rows(options.out) if options.out is not None and options.out.exists() else []
    done = {key_of(row) for row in rows}
    environment = Environment.detect("cpu" if options.dry_run else "cuda", options.commit)
    if not options.dry_run:
        moe_ext.preload()
    grid = grid_of(options.dry_run, options.samples, options.max_call_seconds, options.metrics)
    print(
        f"{grid.model}, Transformers {transformers.__version__}; {grid.samples} samples of a call "
        f"after a warm-up; decode steps with a static cache of 1,024 tokens at {POSITION}, sdpa"
    )
    given = (options.dtypes, options.implementations, done, environment, options.limit_seconds)
    for row in measure(grid, *given):
        print(_line(row), flush=True)
        rows.append(row)
        if options.out is not None:
            with open_to_append(options.out) as file:
                file.write(row.to_json() + "\n")
    return rows


def _names(known: Sequence[str], text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} must be one of {', '.join(known)}")
    return names


def _picture(options: argparse.Namespace) -> str:
    """Return the plot's path as a page's link; empty without a plot."""
    if options.plot is None:
        return ""
    return Path(os.path.relpath(options.plot, options.markdown.parent)).as_posix()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSONL file to append rows to")
    parser.add_argument("--read", type=Path, help="rows to report on; nothing is measured")
    parser.add_argument("--dtypes", type=lambda text: _names(DTYPES, text), default=DTYPES)
    parser.add_argument(
        "--implementations",
        type=lambda text: _names(IMPLEMENTATIONS, text),
        default=IMPLEMENTATIONS,
    )
    parser.add_argument("--metrics", type=lambda text: _names(METRICS, text), default=METRICS)
    parser.add_argument("--samples", type=int, default=3, help="of a prompt; five times of a step")
    parser.add_argument("--max-call-seconds", type=float, default=4.0)
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    parser.add_argument("--commit", default=None, help="revision for the rows; else git's")
    parser.add_argument("--layers", type=Path, help="rows of bench.run --op fused_moe: one bar")
    parser.add_argument("--markdown", type=Path, help="page to write")
    parser.add_argument("--plot", type=Path, help="PNG to write; needs matplotlib")
    parser.add_argument("--readme", type=Path, help="rewrite the marked section of this file")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    parser.add_argument("--dry-run", action="store_true", help="a miniature on the CPU")
    options = parser.parse_args(arguments)
    if options.samples < 1:
        parser.error(f"--samples must be at least 1, got {options.samples}")
    if options.read is None and not options.dry_run and not torch.cuda.is_available():
        parser.error("a CUDA device must be there, got none; --dry-run runs on the CPU")
    with refused_in_a_line(parser):
        layers = load_rows(options.layers) if options.layers is not None else None
        rows = latest_rows(load_e2e_rows(options.read) if options.read else run(options))
        if options.readme is not None:
            rewrite_section(options.readme, e2e_readme_section(rows), E2E_BEGIN, E2E_END)
    bars = evaluate(rows, layers, SIZES[MODEL]["num_hidden_layers"])
    print(page(rows, bars))
    if options.markdown is not None:
        options.markdown.write_text(page(rows, bars, _picture(options)))
    if options.plot is not None:
        plot(rows, options.plot)
    missed = misses(bars)
    for line in missed:
        print(f"missed: {line}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
