"""The measured choices for scales per block that only Swap-AB kernels take: those of all blocks.

Rows that name kernels of plain order are passed over.
"""

from __future__ import annotations

from moe_ext._dispatch_rows import Row
from moe_ext._dispatch_table_block import CHOICES as OF_ALL_BLOCKS

CHOICES: tuple[Row, ...] = OF_ALL_BLOCKS
