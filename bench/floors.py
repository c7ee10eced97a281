"""The floor of a measurement: what the card cannot beat. One definition for every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.cases import STAGES, Case

# Measured on one H200 (132 SMs, 700 W, CUDA 13.0): bulk copies into shared memory read 4.52 TB/s,
# dense torch.mm reaches 690-730 TFLOP/s in BF16 and torch._scaled_mm 1280-1440 per tensor in FP8,
# and an empty kernel in a CUDA graph takes 1.9 us.
READ_BYTES_PER_US = 4.5e6
OPS_PER_US = {"bf16": 720e6, "fp8": 1350e6}
LAUNCH_US = 2.0
# Work whose operations alone take this part of the floor can reach the card's power limit.
COMPUTE_HEAVY_SHARE = 0.25
ELEMENT_BYTES = {"bf16": 2, "fp8": 1}
OUT_BYTES = 2


@dataclass(frozen=True)
class Work:
    """Bytes and operations of one call, both GEMMs of a pair or layer added up."""

    weight_bytes: float
    activation_bytes: float
    operations: float


def work_of(
    case: Case, stages: Sequence[str], dtype: str, num_tokens: int, active_experts: float
) -> Work:
    """Return the work of one call: weights of the experts that are hit, each activation once."""
    rows = num_tokens * case.top_k
    element = ELEMENT_BYTES[dtype]
    shapes = [case.stage_shape(stage) for stage in stages]
    return Work(
        weight_bytes=sum(active_experts * n * k * element for n, k in shapes),
        activation_bytes=float(sum(rows * (k * element + n * OUT_BYTES) for n, k in shapes)),
        operations=float(sum(2 * rows * n * k for n, k in shapes)),
    )


def layer_work_of(case: Case, dtype: str, num_tokens: int, active_experts: float) -> Work:
    """Return the work of a whole layer: its GEMMs', with other activations.

    Hidden states and output once a token, the intermediate in the dtype of the weights and the
    experts' results in BF16 once a row; gate and up need not leave the chip.
    """
    gemms = work_of(case, STAGES, dtype, num_tokens, active_experts)
    hidden_bytes = case.hidden_size * OUT_BYTES
    row_bytes = case.intermediate_size * ELEMENT_BYTES[dtype] + hidden_bytes
    activation_bytes = num_tokens * (2 * hidden_bytes + case.top_k * row_bytes)
    return replace(gemms, activation_bytes=float(activation_bytes))


def floor_us(work: Work, dtype: str) -> float:
    """Return max(weights / read bandwidth, operations / dense rate) + 2 us."""
    return _floor(work.weight_bytes, work.operations, dtype)


def is_compute_heavy(work: Work, dtype: str) -> bool:
    """Return whether the operations at the dense rate take at least a quarter of the floor."""
    return work.operations / OPS_PER_US[dtype] >= COMPUTE_HEAVY_SHARE * floor_us(work, dtype)


def traffic_floor_us(work: Work, dtype: str) -> float:
    """Return the floor with the bytes of the activations added to those of the weights."""
    return _floor(work.weight_bytes + work.activation_bytes, work.operations, dtype)


def _floor(num_bytes: float, operations: float, dtype: str) -> float:
    return max(num_bytes / READ_BYTES_PER_US, operations / OPS_PER_US[dtype]) + LAUNCH_US
