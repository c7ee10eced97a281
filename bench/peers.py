"""Times of other libraries for the pair of GEMMs, from data/peers_h200_measured.csv."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

PEERS_CSV = Path(__file__).parent / "data" / "peers_h200_measured.csv"
MASKED = "deepgemm_masked"
DEEP_GEMM = ("deepgemm_contig", MASKED)
# Those with FP8 scales per block that time the two GEMMs alone, not a whole layer.
BLOCK_SCALED = (*DEEP_GEMM, "sgl_cutlass_blockwise")
GEMMS = {"gemm_gateup", "gemm_down"}

PeerTimes = dict[tuple[str, str, int], float]
"""(case, dtype, tokens) -> microseconds of both GEMMs together."""


def load_deep_gemm(path: Path = PEERS_CSV, routing: str = "zipf0.6") -> PeerTimes:
    """Return DeepGEMM's best time per cell; FP8 is with block scales."""
    return _best_times(path, DEEP_GEMM, ("none", "block128"), routing)


def load_block_scaled(path: Path = PEERS_CSV, routing: str = "zipf0.6") -> PeerTimes:
    """Return the best time per cell of all FP8 GEMMs with block scales."""
    return _best_times(path, BLOCK_SCALED, ("block128",), routing)


def load_masked(path: Path = PEERS_CSV, routing: str = "zipf0.6") -> PeerTimes:
    """Return the times of DeepGEMM's masked kernels; FP8 is with block scales."""
    return _best_times(path, (MASKED,), ("none", "block128"), routing)


def _best_times(
    path: Path, peers: Collection[str], scales: Collection[str], routing: str
) -> PeerTimes:
    parts: dict[tuple[str, str, str, int], dict[str, float]] = defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["peer"] not in peers or row["scale"] not in scales:
                continue
            if row["op"] in GEMMS and row["routing"] == routing:
                key = (row["peer"], row["case"], row["dtype"], int(row["num_tokens"]))
                parts[key][row["op"]] = float(row["median_us"])
    best: PeerTimes = {}
    for (_, case, dtype, tokens), times in parts.items():
        if set(times) == GEMMS:
            cell = (case, dtype, tokens)
            best[cell] = min(best.get(cell, float("inf")), sum(times.values()))
    return best
