"""Layers and kernels for tests of a layer's first GEMM that finds tokens where they lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.fused_moe import Sizes, integer_layer
from support.kernels import gathering_kernels

Maker = Callable[[str, Sizes, str, int], dict[str, object]]
PLAIN_BLOCK = "gated_fp8b_plain"

LAYOUTS = {
    "bf16": "fp32",
    "tensor": "promoted",
    "static": "promoted",
    "channel": "promoted",
    "block": "block",
}
PAIRS = [
    pytest.param(layout, config, id=f"{layout}-{config.id}")
    for layout, accumulate in LAYOUTS.items()
    for config in gathering_kernels(accumulate)
    # Which takes no bias, as an integer layer has it.
    if config.id != PLAIN_BLOCK
]
pairs = pytest.mark.parametrize(("layout", "config"), PAIRS)
# Kernels for few tokens, which bring a token's scale with it.
NARROW = [pair for pair in PAIRS if pair.values[1].tile_tokens < 64]
narrow_pairs = pytest.mark.parametrize(("layout", "config"), NARROW)


def make_layer(
    layout: str, sizes: Sizes, device: str, seed: int = 1, kind: Maker = integer_layer
) -> dict[str, object]:
    """A layer with weights of a layout; "static": and with scales of activations, all 1."""
    if layout != "static":
        return kind(layout, sizes, device, seed)
    scales = {name: torch.ones((), device=device) for name in ("a1_scale", "a2_scale")}
    return kind("tensor", sizes, device, seed) | scales
