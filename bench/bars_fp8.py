"""The speed bars of FP8 with other scales: per block, and per row and channel. Each set is
evaluated when its rows are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.cases import STAGES, case_names, get_case
from bench.floors import work_of
from bench.lookup import Results
from bench.peers import PeerTimes
from bench.power import SUSTAINED
from bench.rows import Row
from bench.verdicts import (
    PREFILL_TOKENS,
    Bar,
    decode_bar,
    missing,
    peer_bars,
    prefill_bars,
    torch_bars,
)

BLOCK, CHANNEL = "block128", "channel"
DECODE_TOKENS = (16, 64, 128, 256)
NARROW_INTERMEDIATE_SIZE = 300
PREFILL_TFLOPS = {
    ("mixtral", "fp8"): 1180.0,
    ("deepseek-v3-ep8", "fp8"): 1150.0,
    ("qwen3-30b", "fp8"): 920.0,
    ("deepseek-v3-tp8", "fp8"): 620.0,
}
CHANNEL_TOLERANCE = 1.03
# A shard of one and a half blocks of scales against one of two whole blocks.
SHARDS = ("shard-192", "shard-256")
SHARD_TOKENS = (16, 64, 256)
SHARD_TOLERANCE = 1.05


def block_limit_us(case: str, tokens: int, floor: float) -> float:
    """Return the bar of a block-scaled decode cell in microseconds."""
    if tokens == 1:
        return max(floor + (14.0 if case == "deepseek-v3-tp8" else 8.0), 1.12 * floor)
    factor = 1.08
    if get_case(case).intermediate_size < NARROW_INTERMEDIATE_SIZE:
        factor = 1.15
    elif case == "mixtral" and tokens == 256:
        factor = 1.2
    return factor * floor + 5.0


def evaluate(rows: Sequence[Row], peers: PeerTimes) -> list[Bar]:
    """Evaluate the bars whose layout has rows; `peers` are the times of block-scaled GEMMs."""
    burst, sustained = Results(rows), Results(rows, power=SUSTAINED)
    bars: list[Bar] = []
    if burst.cells(BLOCK) or sustained.cells(BLOCK):
        bars += _decode_bars(burst)
        name = f"block pair, T = {PREFILL_TOKENS}"
        bars += prefill_bars(name, PREFILL_TFLOPS, burst, sustained, BLOCK)
        bars += peer_bars("block: faster than peers", burst, peers, BLOCK)
    if any(case in SHARDS for case, _, _ in burst.cells(BLOCK)):
        bars += _shard_bars(burst)
    if burst.cells(CHANNEL):
        bars += _channel_bars(burst)
        bars += torch_bars("row x channel: faster than torch", burst, CHANNEL)
    return bars


def _decode_bars(results: Results) -> Iterator[Bar]:
    for tokens in (*DECODE_TOKENS, 1):
        name = "block pair, T = 16..256" if tokens > 1 else "block pair, T = 1"
        for case in case_names():
            row = results.moe_ext(case, "fp8", tokens, scale=BLOCK)
            limit = block_limit_us(case, tokens, row.floor_us) if row is not None else 0.0
            yield decode_bar(name, f"{case} fp8 T={tokens}", row, limit)


def _shard_bars(results: Results) -> Iterator[Bar]:
    name = "block shard: I = 192 as 256, per byte of weight"
    for tokens in SHARD_TOKENS:
        cell = f"fp8 T={tokens}"
        rows = [results.moe_ext(case, "fp8", tokens, scale=BLOCK) for case in SHARDS]
        short, whole = (_us_per_mb(row) for row in rows)
        if short is None or whole is None:
            yield missing(name, cell)
            continue
        numbers = f"{short:.4f} us/MB <= {SHARD_TOLERANCE} x {whole:.4f}"
        yield Bar(name, cell, short <= SHARD_TOLERANCE * whole, numbers)


def _us_per_mb(row: Row | None) -> float | None:
    """Return the time of a pair over the megabytes of the weights of the experts that are hit."""
    if row is None or row.median_us is None:
        return None
    case = get_case(row.case)
    work = work_of(case, STAGES, row.dtype, row.num_tokens, row.active_experts)
    return 1e6 * row.median_us / work.weight_bytes


def _channel_bars(results: Results) -> Iterator[Bar]:
    name = "row x channel: as per tensor"
    for case, dtype, tokens in results.cells(CHANNEL):
        cell = f"{case} {dtype} T={tokens}"
        row = results.moe_ext(case, dtype, tokens, scale=CHANNEL)
        other = results.moe_ext(case, dtype, tokens)
        if row is None or row.median_us is None or other is None or other.median_us is None:
            yield missing(name, cell)
            continue
        numbers = f"{row.median_us:.1f} us <= {CHANNEL_TOLERANCE} x {other.median_us:.1f}"
        yield Bar(name, cell, row.median_us <= CHANNEL_TOLERANCE * other.median_us, numbers)
