"""Times of other libraries for the pair of GEMMs, from data/peers_h200_measured.csv."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

PEERS_CSV = Path(__file__).parent / "data" / "peers_h200_measured.csv"
DEEP_GEMM = ("deepgemm_contig", "deepgemm_masked")
GEMMS = {"gemm_gateup", "gemm_down"}

PeerTimes = dict[tuple[str, str, int], float]
"""(case, dtype, tokens) -> microseconds of both GEMMs together."""


def load_deep_gemm(path: Path = PEERS_CSV, routing: str = "zipf0.6") -> PeerTimes:
    """Return DeepGEMM's best time per cell; FP8 is with block scales."""
    parts: dict[tuple[str, str, str, int], dict[str, float]] = defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["peer"] in DEEP_GEMM and row["op"] in GEMMS and row["routing"] == routing:
                key = (row["peer"], row["case"], row["dtype"], int(row["num_tokens"]))
                parts[key][row["op"]] = float(row["median_us"])
    best: PeerTimes = {}
    for (_, case, dtype, tokens), times in parts.items():
        if set(times) == GEMMS:
            cell = (case, dtype, tokens)
            best[cell] = min(best.get(cell, float("inf")), sum(times.values()))
    return best
