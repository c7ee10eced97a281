"""The speed bars of the masked layout, evaluated when its rows are there."""

from __future__ import annotations

from collections.abc import Sequence

from bench.bars_fp8 import BLOCK
from bench.layouts import MASKED
from bench.lookup import Results
from bench.peers import PeerTimes
from bench.rows import Row
from bench.verdicts import Bar, peer_bars


def evaluate(rows: Sequence[Row], peers: PeerTimes) -> list[Bar]:
    """Evaluate the bars of a dtype that has masked rows; `peers` are times of masked GEMMs."""
    results = Results(rows, layout=MASKED)
    bars: list[Bar] = []
    for dtype, scale, name in (("fp8", BLOCK, "block"), ("bf16", "none", "BF16")):
        if any(found == dtype for _, found, _ in results.cells(scale)):
            own = {cell: time for cell, time in peers.items() if cell[1] == dtype}
            bars += peer_bars(f"{name}, masked: faster than peers", results, own, scale)
    return bars
