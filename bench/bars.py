"""The speed bars of a release, evaluated on result rows: pass, miss or missing, with numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench.cases import TOKENS
from bench.peers import PeerTimes
from bench.rows import Row, is_main_layout, latest

DECODE_CASES = ("qwen3-30b", "mixtral", "deepseek-v3-tp8")
DECODE_TOKENS = (16, 64, 128, 256)
ROUTING = "zipf0.6"
# Accumulation that a bar without further words means.
DEFAULT_ACCUMULATE = {"bf16": "fp32", "fp8": "promoted"}
PREFILL_TOKENS = 8192
PREFILL_TFLOPS = {
    ("mixtral", "fp8"): 1180.0,
    ("qwen3-30b", "fp8"): 920.0,
    ("mixtral", "bf16"): 660.0,
    ("qwen3-30b", "bf16"): 540.0,
}
# The peers' rows come from another card of the same kind, and cards differ by 2-3 %.
PEER_TOLERANCE = 1.03


@dataclass(frozen=True)
class Bar:
    """One cell of a bar. `passed` is None when a row that it needs is missing."""

    name: str
    cell: str
    passed: bool | None
    numbers: str


class Results:
    """Pair rows of one routing kind, by provider, case, dtype, accumulation and tokens."""

    def __init__(self, rows: Iterable[Row], routing: str = ROUTING) -> None:
        """Index the last row of every measurement that has a time."""
        self._rows = {
            (row.provider, row.case, row.dtype, row.accumulate, row.num_tokens): row
            for row in latest(rows)
            if row.op == "grouped_gemm_pair" and row.routing == routing and is_main_layout(row)
        }

    def get(self, provider: str, case: str, dtype: str, accumulate: str, tokens: int) -> Row | None:
        """Return a row that has a time."""
        row = self._rows.get((provider, case, dtype, accumulate, tokens))
        return row if row is not None and row.median_us is not None else None

    def moe_ext(self, case: str, dtype: str, tokens: int) -> Row | None:
        """Return this project's row with the default accumulation."""
        return self.get("moe_ext", case, dtype, DEFAULT_ACCUMULATE[dtype], tokens)

    def torch_us(self, case: str, dtype: str, tokens: int) -> float | None:
        """Return PyTorch's time in the same run, the faster of its accumulations."""
        kinds = ("fp32",) if dtype == "bf16" else ("promoted", "fast")
        rows = [self.get("torch", case, dtype, kind, tokens) for kind in kinds]
        times = [row.median_us for row in rows if row is not None and row.median_us is not None]
        return min(times, default=None)

    def torch_skipped(self, case: str, dtype: str, tokens: int) -> str:
        """Return why PyTorch was not timed; empty when it was or was not asked."""
        kinds = ("fp32",) if dtype == "bf16" else ("promoted", "fast")
        rows = [self._rows.get(("torch", case, dtype, kind, tokens)) for kind in kinds]
        return next((row.skipped_reason for row in rows if row is not None), "")

    def cells(self) -> list[tuple[str, str, int]]:
        """Return (case, dtype, tokens) of this project's rows, measured or not, in order."""
        return list(
            dict.fromkeys((case, dtype, t) for p, case, dtype, _, t in self._rows if p == "moe_ext")
        )


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
    """Evaluate every bar on the rows of a run."""
    results = Results(rows)
    return [
        *_decode_bars(results),
        *_prefill_bars(results),
        *_torch_bars(results),
        *_peer_bars(results, peers),
    ]


def _decode_bars(results: Results) -> Iterator[Bar]:
    for tokens in (*DECODE_TOKENS, 4, 1):
        name = "pair, T = 16..256" if tokens > 4 else f"pair, T = {tokens}"
        for case in DECODE_CASES:
            for dtype in ("bf16", "fp8"):
                cell = f"{case} {dtype} T={tokens}"
                row = results.moe_ext(case, dtype, tokens)
                if row is None or row.median_us is None:
                    yield Bar(name, cell, None, "no row")
                    continue
                limit = limit_us(case, dtype, tokens, row.floor_us)
                numbers = f"{row.median_us:.1f} us <= {limit:.1f} (floor {row.floor_us:.1f})"
                yield Bar(name, cell, row.median_us <= limit, numbers)


def _prefill_bars(results: Results) -> Iterator[Bar]:
    name = f"pair, T = {PREFILL_TOKENS}"
    for (case, dtype), bar in PREFILL_TFLOPS.items():
        row = results.moe_ext(case, dtype, PREFILL_TOKENS)
        if row is None or row.tflops is None:
            yield Bar(name, f"{case} {dtype}", None, "no row")
            continue
        yield Bar(
            name, f"{case} {dtype}", row.tflops >= bar, f"{row.tflops:.0f} >= {bar:.0f} TFLOP/s"
        )
        if dtype != "fp8":
            continue
        fast = results.get("moe_ext", case, dtype, "fast", PREFILL_TOKENS)
        if fast is None or fast.tflops is None:
            yield Bar(name, f"{case} fast >= promoted", None, "no row")
            continue
        numbers = f"{fast.tflops:.0f} >= {row.tflops:.0f} TFLOP/s"
        yield Bar(name, f"{case} fast >= promoted", fast.tflops >= row.tflops, numbers)


def _torch_bars(results: Results) -> Iterator[Bar]:
    for case, dtype, tokens in results.cells():
        if tokens not in TOKENS:
            continue
        row, other = results.moe_ext(case, dtype, tokens), results.torch_us(case, dtype, tokens)
        cell = f"{case} {dtype} T={tokens}"
        skipped = results.torch_skipped(case, dtype, tokens)
        if row is not None and other is None and skipped:
            yield Bar("faster than torch", cell, True, f"torch cannot: {skipped[:60]}")
            continue
        if row is None or row.median_us is None or other is None:
            yield Bar("faster than torch", cell, None, "no row")
            continue
        numbers = f"{row.median_us:.1f} us < {other:.1f}"
        yield Bar("faster than torch", cell, row.median_us < other, numbers)


def _peer_bars(results: Results, peers: PeerTimes) -> Iterator[Bar]:
    for (case, dtype, tokens), other in peers.items():
        cell, row = f"{case} {dtype} T={tokens}", results.moe_ext(case, dtype, tokens)
        if row is None or row.median_us is None:
            yield Bar("faster than DeepGEMM", cell, None, "no row")
            continue
        numbers = f"{row.median_us:.1f} us <= {PEER_TOLERANCE} x {other:.1f}"
        yield Bar("faster than DeepGEMM", cell, row.median_us <= PEER_TOLERANCE * other, numbers)


def format_bars(bars: Sequence[Bar], *, verbose: bool = True) -> str:
    """Return one line per bar cell, or only those that did not pass, and a count per bar."""
    lines = [
        f"{_verdict(bar):7} {bar.name:22} {bar.cell:34} {bar.numbers}"
        for bar in bars
        if verbose or bar.passed is not True
    ]
    for name in dict.fromkeys(bar.name for bar in bars):
        verdicts = [_verdict(bar) for bar in bars if bar.name == name]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("pass", "MISS", "missing"))
        lines.append(f"{name}: {counts}")
    return "\n".join(lines)


def _verdict(bar: Bar) -> str:
    return {True: "pass", False: "MISS", None: "missing"}[bar.passed]
