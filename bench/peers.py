"""Times of other libraries for the pair of GEMMs and the layer: data/peers_h200_measured.csv."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from bench.files import FileError, text_of
from bench.layer import TENSOR_STATIC

PEERS_CSV = Path(__file__).parent / "data" / "peers_h200_measured.csv"
MASKED = "deepgemm_masked"
DEEP_GEMM = ("deepgemm_contig", MASKED)
# Those with FP8 scales per block that time the two GEMMs alone, not a whole layer.
BLOCK_SCALED = (*DEEP_GEMM, "sgl_cutlass_blockwise")
GEMMS = {"gemm_gateup", "gemm_down"}
LAYERS = {"moe"}
# Scales of the activations are given, not computed.
STATIC_SCALES = ("flashinfer_cutlass",)
COLUMNS = ("peer", "op", "dtype", "scale", "case", "num_tokens", "routing", "median_us")

PeerTimes = dict[tuple[str, str, int], float]
"""(case, dtype, tokens) -> microseconds of both GEMMs together, or of a layer."""


class Peers(NamedTuple):
    """Best times per cell, by what they are compared with."""

    deep_gemm: PeerTimes
    block_scaled: PeerTimes
    masked: PeerTimes
    layers: dict[str, PeerTimes]  # by kind of scales


def load_peers(path: Path = PEERS_CSV) -> Peers:
    """Read all that a report needs."""
    return Peers(
        load_deep_gemm(path), load_block_scaled(path), load_masked(path), load_layers(path)
    )


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
    def fits(row: dict[str, str]) -> bool:
        return row["peer"] in peers and row["scale"] in scales

    return _best_sums(path, fits, GEMMS, routing)


def load_layers(path: Path = PEERS_CSV, routing: str = "zipf0.6") -> dict[str, PeerTimes]:
    """Return the best time per cell of all whole layers with the same kind of scales."""
    kinds = {_layer_scale(row) for row in _rows(path) if row["op"] in LAYERS}

    def load(kind: str) -> PeerTimes:
        return _best_sums(path, lambda row: _layer_scale(row) == kind, LAYERS, routing)

    return {kind: load(kind) for kind in sorted(kinds)}


def _rows(path: Path) -> Iterator[dict[str, str]]:
    rows = csv.DictReader(text_of(path).splitlines())
    if not set(COLUMNS) <= set(rows.fieldnames or ()):
        raise FileError(f"{path} must be a CSV with the columns {', '.join(COLUMNS)}, got others")
    yield from rows


def _layer_scale(row: dict[str, str]) -> str:
    """Return what a peer's scales are called in rows of this benchmark."""
    static = row["peer"] in STATIC_SCALES and row["scale"] == "tensor"
    return TENSOR_STATIC if static else row["scale"]


def _best_sums(
    path: Path, fits: Callable[[dict[str, str]], bool], ops: Collection[str], routing: str
) -> PeerTimes:
    """Return the best peer's time of all `ops` together."""
    parts: dict[tuple[str, str, str, int], dict[str, float]] = defaultdict(dict)
    for row in _rows(path):
        if row["op"] in ops and row["routing"] == routing and fits(row):
            key = (row["peer"], row["case"], row["dtype"], int(row["num_tokens"]))
            parts[key][row["op"]] = float(row["median_us"])
    best: PeerTimes = {}
    for (_, case, dtype, tokens), times in parts.items():
        if set(times) == ops:
            cell = (case, dtype, tokens)
            best[cell] = min(best.get(cell, float("inf")), sum(times.values()))
    return best
