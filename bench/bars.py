"""The speed bars of the first release: BF16, and FP8 with one scale a tensor or expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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

DECODE_CASES = ("qwen3-30b", "mixtral", "deepseek-v3-tp8")
DECODE_TOKENS = (16, 64, 128, 256)
PREFILL_TFLOPS = {
    ("mixtral", "fp8"): 1180.0,
    ("qwen3-30b", "fp8"): 920.0,
    ("mixtral", "bf16"): 660.0,
    ("qwen3-30b", "bf16"): 540.0,
}


def limit_us(case: str, dtype: str, tokens: int, floor: float) -> float:
    """Return the bar of a decode cell in microseconds."""
    if tokens == 1:
        return max(floor + (13.0 if case == "deepseek-v3-tp8" else 7.0), 1.1 * floor)
    factor = 1.08
    if tokens == 4 and case == "deepseek-v3-tp8":
        factor = 1.3
    elif tokens > 4 and (
        (case == "deepseek-v3-tp8" and dtype == "fp8") or (case == "mixtral" and tokens == 256)
    ):
        factor = 1.12
    return factor * floor + 4.0


def evaluate(rows: Sequence[Row], peers: PeerTimes) -> list[Bar]:
    """Evaluate every bar on the rows of a run; `peers` are DeepGEMM's times."""
    results = Results(rows)
    prefill = f"pair, T = {PREFILL_TOKENS}"
    return [
        *_decode_bars(results),
        *prefill_bars(prefill, PREFILL_TFLOPS, results, Results(rows, power=SUSTAINED)),
        *_fast_bars(prefill, results),
        *torch_bars("faster than torch", results),
        *peer_bars("faster than DeepGEMM", results, peers),
    ]


def _decode_bars(results: Results) -> Iterator[Bar]:
    for tokens in (*DECODE_TOKENS, 4, 1):
        name = "pair, T = 16..256" if tokens > 4 else f"pair, T = {tokens}"
        for case in DECODE_CASES:
            for dtype in ("bf16", "fp8"):
                row = results.moe_ext(case, dtype, tokens)
                limit = limit_us(case, dtype, tokens, row.floor_us) if row is not None else 0.0
                yield decode_bar(name, f"{case} {dtype} T={tokens}", row, limit)


def _fast_bars(name: str, results: Results) -> Iterator[Bar]:
    for case, dtype in PREFILL_TFLOPS:
        if dtype != "fp8":
            continue
        cell = f"{case} fast >= promoted"
        row = results.moe_ext(case, dtype, PREFILL_TOKENS)
        fast = results.get("moe_ext", case, dtype, PREFILL_TOKENS, accumulate="fast")
        if row is None or row.tflops is None or fast is None or fast.tflops is None:
            yield missing(name, cell)
            continue
        numbers = f"{fast.tflops:.0f} >= {row.tflops:.0f} TFLOP/s"
        yield Bar(name, cell, fast.tflops >= row.tflops, numbers)
