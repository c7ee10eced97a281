"""Operands of the accuracy measurement: seeded BF16 data, and their FP8 in each scale layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import moe_ext
import torch
from torch import Tensor

from bench.scales import SCALES, has_blocks, split_kind

OUTLIERS, SAME_SIGNED = "outliers", "same-signed"
DATA = (OUTLIERS, SAME_SIGNED)
LOG_DEVIATION = 0.5
OUTLIER_FACTOR = 100.0
# Channels of K for each that is an outlier.
OUTLIER_EVERY = 512

POWER_OF_TWO = "_pow2"
KINDS = (*SCALES, f"block128{POWER_OF_TWO}")
_GRANULARITY_A = {"tensor": "tensor", "channel": "row", "block128": "1x128"}
_GRANULARITY_B = {"tensor": "tensor", "channel": "row", "block128": "128x128"}


@dataclass(frozen=True)
class Sizes:
    """Sizes of one product; the sizes of K are apart, as they are what varies."""

    counts: tuple[int, ...]
    n: int

    @property
    def num_rows(self) -> int:
        """Rows of all groups."""
        return sum(self.counts)


@dataclass(frozen=True)
class Operands:
    """One grouped product, in BF16 (scales None) or quantised."""

    a: Tensor  # (num_rows, k)
    b: Tensor  # (num_groups, n, k)
    offs: Tensor  # (num_groups,) int32
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None


def describe_data() -> str:
    """Return the rule of `make_operands` in words."""
    return (
        f"Both data sets are drawn from N(0, 1) with a fixed seed and rounded to BF16. "
        f"`{OUTLIERS}`: each channel of the activations (along K) has a log-normal scale "
        f"exp({LOG_DEVIATION:g} N(0, 1)), and one channel in {OUTLIER_EVERY}, at random places, is "
        f"{OUTLIER_FACTOR:g} times as large; each output channel of the weights has a log-normal "
        f"scale of the same kind. `{SAME_SIGNED}`: |N(0, 1)| for both, without such scales, so "
        f"that sums only grow. Weights are divided by the square root of K."
    )


def make_operands(data: str, sizes: Sizes, k: int, device: torch.device) -> Operands:
    """Draw the BF16 operands by the rule of `describe_data`, the same on every device."""
    generator = torch.Generator().manual_seed(k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    num_groups, n = len(sizes.counts), sizes.n
    a, b = normal(sizes.num_rows, k), normal(num_groups, n, k)
    if data == SAME_SIGNED:
        a, b = a.abs_(), b.abs_()
    elif data == OUTLIERS:
        a *= (LOG_DEVIATION * normal(k)).exp_()
        places = torch.randperm(k, generator=generator)[: max(1, k // OUTLIER_EVERY)]
        a[:, places] *= OUTLIER_FACTOR
        b *= (LOG_DEVIATION * normal(num_groups, n, 1)).exp_()
    else:
        raise ValueError(f"make_operands: `data` must be one of {DATA}, got {data!r}")
    b /= math.sqrt(k)
    offs = torch.tensor(sizes.counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Operands(a.bfloat16().to(device), b.bfloat16().to(device), offs.to(device))


def base_kind(kind: str) -> str:
    """Return the name in `bench.scales` of one of `KINDS`."""
    return kind.removesuffix(POWER_OF_TWO)


def accumulates(kind: str) -> tuple[str, ...]:
    """Return the ways to sum that a layout has."""
    return ("promoted",) if has_blocks(base_kind(kind)) else ("promoted", "fast")


def quantise(operands: Operands, kind: str) -> Operands:
    """Quantise BF16 operands with `moe_ext.quantize_fp8` into one of `KINDS`."""
    of_a, of_b = split_kind(base_kind(kind))
    power_of_two = kind.endswith(POWER_OF_TWO)
    a, scale_a = moe_ext.quantize_fp8(operands.a, _GRANULARITY_A[of_a], power_of_two=power_of_two)
    b, scale_b = moe_ext.quantize_fp8(operands.b, _GRANULARITY_B[of_b], power_of_two=power_of_two)
    return Operands(a, b, operands.offs, scale_a, scale_b)
