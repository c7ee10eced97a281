"""The speed bars of the whole layer, from ids to output: evaluated when it has rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from bench.cases import TOKENS, case_names
from bench.layer import TENSOR_STATIC
from bench.lookup import Results
from bench.ops import LAYER
from bench.peers import PeerTimes
from bench.power import SUSTAINED
from bench.rows import Row
from bench.verdicts import PREFILL_TOKENS, Bar, decode_bar, missing, peer_bars, prefill_bars

BLOCK = "block128"
# Kinds of scales, and dtypes that have them.
KINDS = {"none": "bf16", "tensor": "fp8", TENSOR_STATIC: "fp8", "channel": "fp8", BLOCK: "fp8"}
DECODE_TOKENS = (4, 16, 64, 128, 256)
DECODE_SHARE = 0.8
SLOW_START_CASES = ("deepseek-v3-tp8", "qwen3-next")
# Block-scaled prefill against the best peer: each cell, and the mean from MEAN_TOKENS up.
SPEEDUP_TOKENS, MEAN_TOKENS = 512, 1024
SPEEDUP, NEAR_FLOOR, MEAN_SPEEDUP = 1.3, 1.12, 1.5
PREFILL_TFLOPS = {
    BLOCK: {
        ("mixtral", "fp8"): 1080.0,
        ("qwen3-30b", "fp8"): 750.0,
        ("deepseek-v3-tp8", "fp8"): 500.0,
    },
    "tensor": {("mixtral", "fp8"): 1130.0, ("qwen3-30b", "fp8"): 780.0},
    TENSOR_STATIC: {("mixtral", "fp8"): 1130.0, ("qwen3-30b", "fp8"): 780.0},
    "none": {("mixtral", "bf16"): 630.0, ("qwen3-30b", "bf16"): 490.0},
}
HOST_US = 40.0


def first_token_limit_us(case: str, floor: float) -> float:
    """Return the bar of T = 1 in microseconds."""
    return max(floor + (15.0 if case in SLOW_START_CASES else 10.0), 1.1 * floor)


def usual_limit_us(floor: float) -> float:
    """Return what `DECODE_SHARE` of the decode cells keep to, in microseconds."""
    return 1.1 * floor + 4.0


def worst_limit_us(floor: float) -> float:
    """Return what every decode cell keeps to, in microseconds."""
    return 1.2 * floor + 6.0


def evaluate(rows: Sequence[Row], peers: Mapping[str, PeerTimes]) -> list[Bar]:
    """Evaluate the bars of every case and kind of scales once any has a row.

    Args:
        rows: Result rows.
        peers: Kind of scales -> times of whole layers.
    """
    results = Results(rows, op=LAYER)
    sustained = Results(rows, power=SUSTAINED, op=LAYER)
    if not any(found.cells(scale) for found in (results, sustained) for scale in KINDS):
        return []
    bars = [*_first_token_bars(results), *_decode_bars(results), _usual_bar(results)]
    for scale, dtype in KINDS.items():
        own = _asked(peers.get(scale, {}), results, scale)
        bars += peer_bars(f"{_layer(dtype, scale)}: faster than peers", results, own, scale)
    block_peers = _asked(peers.get(BLOCK, {}), results, BLOCK)
    bars += _speedup_bars(results, block_peers)
    for scale, rates in PREFILL_TFLOPS.items():
        name = f"{_layer(KINDS[scale], scale)}, T = {PREFILL_TOKENS}"
        bars += prefill_bars(name, rates, results, sustained, scale)
    return [*bars, *_host_bars(results)]


def _layer(dtype: str, scale: str) -> str:
    return "layer bf16" if dtype == "bf16" else f"layer {scale}"


def _asked(peers: PeerTimes, results: Results, scale: str) -> PeerTimes:
    """Leave out peers' token counts that are not in the grid and have no row."""
    return {
        (case, dtype, tokens): time
        for (case, dtype, tokens), time in peers.items()
        if tokens in TOKENS or results.moe_ext(case, dtype, tokens, scale=scale) is not None
    }


def _cells(results: Results, tokens: Sequence[int]) -> Iterator[tuple[str, str, Row | None]]:
    """Yield case, name and row of every cell of these token counts."""
    for scale, dtype in KINDS.items():
        kind = dtype if dtype == "bf16" else f"{dtype} {scale}"
        for t in tokens:
            for case in case_names():
                row = results.moe_ext(case, dtype, t, scale=scale)
                yield case, f"{case} {kind} T={t}", row


def _first_token_bars(results: Results) -> Iterator[Bar]:
    for case, cell, row in _cells(results, (1,)):
        limit = first_token_limit_us(case, row.floor_us) if row is not None else 0.0
        yield decode_bar("layer, T = 1", cell, row, limit)


def _decode_bars(results: Results) -> Iterator[Bar]:
    for _, cell, row in _cells(results, DECODE_TOKENS):
        limit = worst_limit_us(row.floor_us) if row is not None else 0.0
        yield decode_bar("layer, T = 4..256: 1.2 x floor + 6 us", cell, row, limit)


def _usual_bar(results: Results) -> Bar:
    """Count the cells within the tighter limit; undecided while missing ones could decide."""
    name = "layer, T = 4..256: 1.1 x floor + 4 us"
    cells = list(_cells(results, DECODE_TOKENS))
    over = {}
    hits = 0
    for _, cell, row in cells:
        if row is None or row.median_us is None:
            continue
        limit = usual_limit_us(row.floor_us)
        if row.median_us <= limit:
            hits += 1
        else:
            over[cell] = f"{cell} {row.median_us:.1f} > {limit:.1f}"
    wanted = math.ceil(DECODE_SHARE * len(cells))
    passed = True if hits >= wanted else False if len(cells) - len(over) < wanted else None
    listed = f"; over: {', '.join(over.values())}" if over else ""
    numbers = f"{hits} of {len(cells)} within, {wanted} wanted{listed}"
    return Bar(name, f"{DECODE_SHARE:.0%} of the cells", passed, numbers)


def _speedup_bars(results: Results, peers: PeerTimes) -> Iterator[Bar]:
    name = f"layer {BLOCK}, T = {SPEEDUP_TOKENS}..{PREFILL_TOKENS}"
    gains: list[float | None] = []
    for (case, dtype, tokens), other in peers.items():
        if not SPEEDUP_TOKENS <= tokens <= PREFILL_TOKENS:
            continue
        cell = f"{case} {dtype} T={tokens}"
        row = results.moe_ext(case, dtype, tokens, scale=BLOCK)
        gain = None if row is None or row.median_us is None else other / row.median_us
        if tokens >= MEAN_TOKENS:
            gains.append(gain)
        if row is None or row.median_us is None or gain is None:
            yield missing(name, cell)
            continue
        ratio = row.median_us / row.floor_us
        numbers = f"{gain:.2f}x >= {SPEEDUP}x, or {ratio:.2f} <= {NEAR_FLOOR} x floor"
        yield Bar(name, cell, gain >= SPEEDUP or ratio <= NEAR_FLOOR, numbers)
    mean_name, cell = f"{name}: mean", f"from T = {MEAN_TOKENS} up"
    known = [gain for gain in gains if gain is not None]
    if not known:
        yield missing(mean_name, cell)
        return
    mean = math.exp(sum(math.log(gain) for gain in known) / len(known))
    passed = mean >= MEAN_SPEEDUP if len(known) == len(gains) else None
    numbers = f"{mean:.2f}x >= {MEAN_SPEEDUP}x over {len(known)} of {len(gains)} cells"
    yield Bar(mean_name, cell, passed, numbers)


def _host_bars(results: Results) -> Iterator[Bar]:
    for scale, dtype in KINDS.items():
        rows = [
            results.moe_ext(case, kind, tokens, scale=scale)
            for case, kind, tokens in results.cells(scale)
        ]
        times = [row.host_us for row in rows if row is not None and row.host_us is not None]
        name, cell = "layer: host time of an eager call", _layer(dtype, scale)
        if not times:
            yield missing(name, cell)
            continue
        slowest = max(times)
        yield Bar(name, cell, slowest <= HOST_US, f"at most {slowest:.1f} us <= {HOST_US:.0f}")
