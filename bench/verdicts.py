"""What a bar says of one cell: pass, miss or missing, with numbers. The bars themselves are in
`bars.py` and `bars_*.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.cases import TOKENS
from bench.lookup import Results
from bench.peers import PeerTimes
from bench.rows import Row

PREFILL_TOKENS = 8192
# The peers' rows come from another card of the same kind, and cards differ by 2-3 %.
PEER_TOLERANCE = 1.03


@dataclass(frozen=True)
class Bar:
    """One cell of a bar. `passed` is None when a row that it needs is missing."""

    name: str
    cell: str
    passed: bool | None
    numbers: str


def missing(name: str, cell: str) -> Bar:
    """Return the verdict of a cell without a row."""
    return Bar(name, cell, None, "no row")


def decode_bar(name: str, cell: str, row: Row | None, limit_us: float) -> Bar:
    """Compare a time with a limit made from the floor."""
    if row is None or row.median_us is None:
        return missing(name, cell)
    numbers = f"{row.median_us:.1f} us <= {limit_us:.1f} (floor {row.floor_us:.1f})"
    return Bar(name, cell, row.median_us <= limit_us, numbers)


def prefill_bars(
    name: str,
    rates: Mapping[tuple[str, str], float],
    burst: Results,
    sustained: Results,
    scale: str | None = None,
) -> Iterator[Bar]:
    """Compare TFLOP/s at `PREFILL_TOKENS` with a rate by (case, dtype), in bursts and, where there
    are such rows, sustained."""
    for (case, dtype), rate in rates.items():
        cell = f"{case} {dtype}"
        yield _rate_bar(name, cell, burst.moe_ext(case, dtype, PREFILL_TOKENS, scale=scale), rate)
        held = sustained.moe_ext(case, dtype, PREFILL_TOKENS, scale=scale)
        if held is not None:
            yield _rate_bar(name, f"{cell} (sustained)", held, rate)


def _rate_bar(name: str, cell: str, row: Row | None, rate: float) -> Bar:
    if row is None or row.tflops is None:
        return missing(name, cell)
    return Bar(name, cell, row.tflops >= rate, f"{row.tflops:.0f} >= {rate:.0f} TFLOP/s")


def torch_bars(name: str, results: Results, scale: str | None = None) -> Iterator[Bar]:
    """Ask for less than PyTorch's time, of the same run; what PyTorch cannot do passes."""
    for case, dtype, tokens in results.cells(scale):
        if tokens not in TOKENS:
            continue
        row = results.moe_ext(case, dtype, tokens, scale=scale)
        other = results.torch_us(case, dtype, tokens)
        cell = f"{case} {dtype} T={tokens}"
        skipped = results.torch_skipped(case, dtype, tokens)
        if row is not None and other is None and skipped:
            yield Bar(name, cell, True, f"torch cannot: {skipped[:60]}")
        elif row is None or row.median_us is None or other is None:
            yield missing(name, cell)
        else:
            numbers = f"{row.median_us:.1f} us < {other:.1f}"
            yield Bar(name, cell, row.median_us < other, numbers)


def peer_bars(
    name: str, results: Results, peers: PeerTimes, scale: str | None = None
) -> Iterator[Bar]:
    """Ask for at most the peers' time, and a tolerance for another card."""
    for (case, dtype, tokens), other in peers.items():
        cell = f"{case} {dtype} T={tokens}"
        row = results.moe_ext(case, dtype, tokens, scale=scale)
        if row is None or row.median_us is None:
            yield missing(name, cell)
            continue
        numbers = f"{row.median_us:.1f} us <= {PEER_TOLERANCE} x {other:.1f}"
        yield Bar(name, cell, row.median_us <= PEER_TOLERANCE * other, numbers)


def format_bars(bars: Sequence[Bar], *, verbose: bool = True) -> str:
    """Return one line per bar cell, or only those that did not pass, and a count per bar."""
    width = max((len(bar.name) for bar in bars), default=0)
    lines = [format_bar(bar, width) for bar in bars if verbose or bar.passed is not True]
    for name in dict.fromkeys(bar.name for bar in bars):
        verdicts = [_verdict(bar) for bar in bars if bar.name == name]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("pass", "MISS", "missing"))
        lines.append(f"{name}: {counts}")
    return "\n".join(lines)


def format_bar(bar: Bar, width: int = 0) -> str:
    """Return the line of one cell, its bar's name as wide as the widest beside it."""
    return f"{_verdict(bar):7} {bar.name:{width}} {bar.cell:34} {bar.numbers}"


def _verdict(bar: Bar) -> str:
    return {True: "pass", False: "MISS", None: "missing"}[bar.passed]
