"""What is timed: both GEMMs of a layer, one of them alone, or the whole expert layer."""

from __future__ import annotations

from bench.cases import STAGES

PAIR, GEMM, LAYER = "grouped_gemm_pair", "grouped_gemm", "fused_moe"
OPS = (PAIR, GEMM, LAYER)


def stage_sets(op: str) -> list[tuple[str, ...]]:
    """Return the stages of each cell that an op makes of a case."""
    return [(stage,) for stage in STAGES] if op == GEMM else [STAGES]
