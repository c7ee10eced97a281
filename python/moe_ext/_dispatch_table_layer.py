"""The measured choices for whole layers, by the first GEMM's operands: see `_dispatch_table`."""

from __future__ import annotations

from moe_ext import (
    _dispatch_table_layer_bf16,
    _dispatch_table_layer_block,
    _dispatch_table_layer_block_swapped,
    _dispatch_table_layer_promoted,
)
from moe_ext._dispatch_measured import Measured

LAYER_TABLES: dict[tuple[str, str], Measured] = {
    ("bf16", "fp32"): _dispatch_table_layer_bf16.CHOICES,
    ("fp8", "promoted"): _dispatch_table_layer_promoted.CHOICES,
    ("fp8", "block"): _dispatch_table_layer_block.CHOICES,
    ("fp8", "block_swapped"): _dispatch_table_layer_block_swapped.CHOICES,
}
