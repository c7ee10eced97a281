"""Time a whole model of Transformers with each implementation of its experts.

    python -m bench.e2e_transformers --out e2e.jsonl
    python -m bench.e2e_transformers --read e2e.jsonl --check --markdown e2e.md --plot e2e.png

Qwen3-30B-A3B with random weights: milliseconds to the first token, tokens per second of a captured
decode step, and the share of the time that the experts have: what a call takes less once every
module of experts returns its input. A run that is started again goes on where its file ends.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moe_ext
import torch
import transformers
from moe_ext.integrations.transformers import register

from bench.appending import check_appendable, open_to_append
from bench.e2e_model import (
    MODEL,
    STUB,
    TINY,
    experts_error,
    make_model,
    register_stub,
    to_fp8,
)
from bench.e2e_page import e2e_markdown, misses, plot
from bench.e2e_rows import (
    DECODE,
    METRICS,
    OP,
    TTFT,
    E2ERow,
    Key,
    key_of,
    latest_rows,
    load_e2e_rows,
)
from bench.e2e_time import POSITION, CallTime, TooSlow, time_decode, time_to_first_token
from bench.files import refused_in_a_line
from bench.measure import Environment

DTYPES = ("bf16", "fp8")
# Those whose times are wanted most come first: a run may be cut short.
IMPLEMENTATIONS = ("moe_ext", "grouped_mm", "batched_mm", "deepgemm", "sonicmoe", "eager")
UNCAPTURED = ("eager",)
"""They read the experts that are hit on the host, which no capture allows."""
MAX_ERROR = {"bf16": 0.02, "fp8": 0.1}


@dataclass(frozen=True)
class Cell:
    """One call whose time is asked for; of a decode step `prompt_tokens` is its position."""

    metric: str
    batch: int
    prompt_tokens: int


@dataclass(frozen=True)
class Grid:
    """What a run measures."""

    model: str
    cells: tuple[Cell, ...]
    samples: int
    max_call_seconds: float


def grid_of(dry_run: bool, samples: int, max_call_seconds: float, metrics: Sequence[str]) -> Grid:
    """Return the cells: decode steps first, as they take the least time."""
    steps: tuple[int, ...] = (1, 2) if dry_run else (1, 8, 64)
    batches = (1, 2) if dry_run else (1, 8)
    prompts: tuple[int, ...] = (8,) if dry_run else (512, 2048, 8192)
    cells = [Cell(DECODE, batch, POSITION) for batch in steps]
    cells += [Cell(TTFT, batch, tokens) for batch in batches for tokens in prompts]
    kept = tuple(cell for cell in cells if cell.metric in metrics)
    return Grid(TINY if dry_run else MODEL, kept, samples, max_call_seconds)


class Runner:
    """Measures cells of one model in one dtype."""

    def __init__(self, model: Any, dtype: str, grid: Grid, environment: Environment) -> None:
        """Keep what all rows share."""
        self.model, self.dtype, self.grid, self.environment = model, dtype, grid, environment
        self._stubbed: dict[Cell, CallTime] = {}

    def rows(self, implementation: str, cells: Sequence[Cell]) -> Iterator[E2ERow]:
        """Check an implementation, then time it; a row with a reason where it fails."""
        reason, error = self._failure(implementation)
        for cell in cells:
            if reason:
                yield self._row(implementation, cell, error, skipped_reason=reason)
                continue
            try:
                self.model.set_experts_implementation(implementation)
                timed = self._time(cell, implementation not in UNCAPTURED)
                without = self._without_experts(cell, implementation not in UNCAPTURED)
            # An implementation of others may raise anything; the run goes on without it.
            except Exception as failure:
                why = failure if isinstance(failure, TooSlow) else _in_a_line(failure)
                yield self._row(implementation, cell, error, skipped_reason=str(why))
                self._clear()
                continue
            share = max(0.0, 1 - without.ms / timed.ms)
            yield self._row(implementation, cell, error, timed=timed, share=share)
            self._clear()

    def _failure(self, implementation: str) -> tuple[str, float | None]:
        """Return why an implementation cannot be timed, and its error."""
        try:
            self.model.set_experts_implementation(implementation)
            error = experts_error(self.model)
        except Exception as failure:  # see above
            return _in_a_line(failure), None
        if not error <= MAX_ERROR[self.dtype]:  # written so that NaN fails
            return f"wrong: error {error:.3g}, over {MAX_ERROR[self.dtype]:g}", None
        return "", round(error, 5)

    def _time(self, cell: Cell, captured: bool) -> CallTime:
        samples, limit = self.grid.samples, self.grid.max_call_seconds
        if cell.metric == TTFT:
            return time_to_first_token(self.model, cell.batch, cell.prompt_tokens, samples, limit)
        captured = captured and self.environment.device.type == "cuda"
        # A replay is short and its clock's resolution is not: more of them.
        return time_decode(
            self.model, cell.batch, captured, samples * (5 if captured else 1), limit
        )

    def _without_experts(self, cell: Cell, captured: bool) -> CallTime:
        """Time a cell with experts that return their input, once for all that run alike."""
        if not captured and cell.metric == DECODE:
            self.model.set_experts_implementation(STUB)
            return self._time(cell, captured=False)
        if cell not in self._stubbed:
            self.model.set_experts_implementation(STUB)
            self._stubbed[cell] = self._time(cell, captured)
        return self._stubbed[cell]

    def _row(
        self,
        implementation: str,
        cell: Cell,
        error: float | None,
        *,
        timed: CallTime | None = None,
        share: float | None = None,
        skipped_reason: str = "",
    ) -> E2ERow:
        value = None
        if timed is not None:
            value = timed.ms if cell.metric == TTFT else cell.batch / timed.ms * 1e3
        on_cuda = self.environment.device.type == "cuda"
        return E2ERow(
            op=OP,
            model=self.grid.model,
            dtype=self.dtype,
            implementation=implementation,
            metric=cell.metric,
            batch=cell.batch,
            prompt_tokens=cell.prompt_tokens,
            value=None if value is None else round(value, 3),
            call_ms=None if timed is None else round(timed.ms, 3),
            experts_share=None if share is None else round(share, 4),
            captured=cell.metric == DECODE and on_cuda and implementation not in UNCAPTURED,
            num_samples=0 if timed is None else timed.num_samples,
            max_err=error,
            skipped_reason=skipped_reason,
            device=self.environment.device_name,
            torch=torch.__version__,
            transformers=transformers.__version__,
            commit=self.environment.commit,
        )

    def _clear(self) -> None:
        """Give memory of graphs and of prompts back, so that no cell pays for another's."""
        if self.environment.device.type == "cuda":
            torch.cuda.empty_cache()


def _in_a_line(failure: BaseException) -> str:
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text[:200]}"


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
    parser.add_argument("--markdown", type=Path, help="file to write the tables to")
    parser.add_argument("--plot", type=Path, help="PNG to write; needs matplotlib")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    parser.add_argument("--dry-run", action="store_true", help="a miniature on the CPU")
    options = parser.parse_args(arguments)
    if options.samples < 1:
        parser.error(f"--samples must be at least 1, got {options.samples}")
    if options.read is None and not options.dry_run and not torch.cuda.is_available():
        parser.error("a CUDA device must be there, got none; --dry-run runs on the CPU")
    with refused_in_a_line(parser):
        rows = latest_rows(load_e2e_rows(options.read) if options.read else run(options))
    text = e2e_markdown(rows)
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text + "\n")
    if options.plot is not None:
        plot(rows, options.plot)
    missed = misses(rows)
    for line in missed:
        print(f"missed: {line}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
