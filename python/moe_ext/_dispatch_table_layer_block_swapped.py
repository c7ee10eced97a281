"""The measured choices for layers with scales per block that only Swap-AB kernels take."""

from __future__ import annotations

from moe_ext._dispatch_rows import LayerRow
from moe_ext._dispatch_table_layer_block import CHOICES as OF_ALL_BLOCKS

CHOICES: tuple[LayerRow, ...] = OF_ALL_BLOCKS
