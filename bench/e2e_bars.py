"""The bars of `bench.e2e_transformers`: BF16 against the best other implementation, and a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.e2e_rows import DECODE, MODEL, TTFT, E2ERow
from bench.lookup import Results
from bench.ops import LAYER
from bench.rows import Row

OURS = "moe_ext"
DTYPE = "bf16"
"""What has bars, of `MODEL`."""
LAYER_CASE = "qwen3-30b"
"""The layer of `MODEL` among the cases of `bench.run`."""
MIN_DECODE_SPEEDUP = {1: 1.2, 8: 1.25, 64: 1.1}
"""Tokens per second of a captured step over the best other implementation's, by batch."""
MAX_DECODE_EXPERTS = {1: 0.5, 8: 0.5, 64: 0.6}
"""Time of the experts of a step over the same one's."""
MAX_TTFT = {2048: 0.75, 8192: 0.65}
"""Time to the first token over the best other implementation's, by prompt, batch 1."""
LAYER_BATCH, LAYER_TOLERANCE = 64, 0.1
"""Where the experts of a step, a layer, are held against the layer's own benchmark, and how far."""

Group = tuple[str, str, str, int, int]


@dataclass(frozen=True)
class ModelBar:
    """One bar. `passed` is None when a row that it needs is missing."""

    name: str
    limit: str
    measured: str
    passed: bool | None


def by_cell(rows: Sequence[E2ERow]) -> dict[Group, dict[str, E2ERow]]:
    """Return the rows of each cell by implementation, in the order of the rows."""
    cells: dict[Group, dict[str, E2ERow]] = {}
    for row in rows:
        group = (row.model, row.dtype, row.metric, row.batch, row.prompt_tokens)
        cells.setdefault(group, {})[row.implementation] = row
    return cells


def best_other(cell: dict[str, E2ERow]) -> E2ERow | None:
    """Return the row of the fastest other implementation that was measured."""
    others = [row for name, row in cell.items() if name != OURS and row.call_ms is not None]
    return min(others, key=lambda row: row.call_ms or 0.0, default=None)


def experts_ms(row: E2ERow) -> float:
    """Return the time that the experts of a call take."""
    return (row.call_ms or 0.0) * (row.experts_share or 0.0)


def host_bound(row: E2ERow) -> bool:
    """Return whether a prompt took no longer than without experts: the host's time is measured."""
    return row.metric == TTFT and row.experts_share == 0


OF_HOST = "of the host"
"""What bars and tables say of such a prompt."""


def evaluate(
    rows: Sequence[E2ERow], layers: Sequence[Row] | None, num_layers: int
) -> list[ModelBar]:
    """Evaluate the bars; only cells with ours and another's time have those against others.

    Args:
        rows: Rows of models.
        layers: Rows of `bench.run --op fused_moe`; None leaves the layer's bar out.
        num_layers: Of the model.
    """
    bars: list[ModelBar] = []
    for (model, dtype, metric, batch, prompt), cell in by_cell(rows).items():
        ours, other = cell.get(OURS), best_other(cell)
        if (model, dtype) != (MODEL, DTYPE) or other is None:
            continue
        decode = metric == DECODE and batch in MIN_DECODE_SPEEDUP
        ttft = metric == TTFT and batch == 1 and prompt in MAX_TTFT
        if not decode and not ttft:
            continue
        what = f"of a step, batch {batch}" if decode else f"to the first token, {prompt:,} tokens"
        if ours is None or ours.call_ms is None:
            bars.append(ModelBar(f"time {what}", "against another", "no time of ours", None))
        elif decode:
            bars += _decode_bars(ours, other)
        else:
            ratio, limit = ours.call_ms / (other.call_ms or 1.0), MAX_TTFT[prompt]
            measured = f"{_of(ratio, other)}{f'; {OF_HOST}' if host_bound(ours) else ''}"
            bars.append(ModelBar(f"time {what}", f"<= {limit} x", measured, ratio <= limit))
    if layers is not None:
        bars.append(_layer_bar(rows, layers, num_layers))
    return bars


def _decode_bars(ours: E2ERow, other: E2ERow) -> Iterator[ModelBar]:
    batch = ours.batch
    speedup, least = (other.call_ms or 0.0) / (ours.call_ms or 1.0), MIN_DECODE_SPEEDUP[batch]
    name = f"tokens/s of a decode step, batch {batch}"
    yield ModelBar(name, f">= {least} x", _of(speedup, other), speedup >= least)
    share, most = experts_ms(ours) / max(experts_ms(other), 1e-9), MAX_DECODE_EXPERTS[batch]
    name = f"experts' time of a decode step, batch {batch}"
    yield ModelBar(name, f"<= {most} x", _of(share, other), share <= most)


def _of(ratio: float, other: E2ERow) -> str:
    return f"{ratio:.3f} x {other.implementation}"


def _layer_bar(rows: Sequence[E2ERow], layers: Sequence[Row], num_layers: int) -> ModelBar:
    """Compare the experts of a step, a layer, with the layer's time by itself."""
    name = f"experts' time of a decode step, batch {LAYER_BATCH}, over the layers by themselves"
    limit = f"{1 - LAYER_TOLERANCE:g} to {1 + LAYER_TOLERANCE:g} x"
    steps = [
        row
        for row in rows
        if (row.model, row.dtype, row.implementation, row.metric, row.batch)
        == (MODEL, DTYPE, OURS, DECODE, LAYER_BATCH)
        and row.call_ms is not None
    ]
    layer = Results(layers, op=LAYER).moe_ext(LAYER_CASE, DTYPE, LAYER_BATCH)
    if not steps or layer is None or layer.median_us is None:
        return ModelBar(name, limit, "no row", None)
    in_step_us = experts_ms(steps[-1]) / num_layers * 1e3
    ratio = in_step_us / layer.median_us
    measured = (
        f"{ratio:.3f} x ({in_step_us:.1f} us a layer over {layer.median_us:.1f}, commit "
        f"{layer.commit})"
    )
    return ModelBar(name, limit, measured, abs(ratio - 1) <= LAYER_TOLERANCE)


def misses(bars: Sequence[ModelBar]) -> list[str]:
    """Say every bar that does not pass, or lacks a row, in a line."""
    return [f"{bar.name}: {bar.measured}, {bar.limit}" for bar in bars if not bar.passed]
