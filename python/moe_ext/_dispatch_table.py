"""The measured choices, by the operands of a GEMM.

What is compiled (csrc/grouped_gemm/configs.def) and what is chosen (the modules named here) are two
lists on purpose. Every choice says what it was measured with; where there is none, the cost model
of `_dispatch` decides. A module holds rows of limits, of which the first match wins, or the
measured points that `bench/tune_tables.py` writes.
"""

from __future__ import annotations

from moe_ext import (
    _dispatch_table_bf16,
    _dispatch_table_block,
    _dispatch_table_block_swapped,
    _dispatch_table_fast,
    _dispatch_table_promoted,
)
from moe_ext._dispatch_points import Points
from moe_ext._dispatch_rows import Row

Table = tuple[Row, ...] | Points

TABLES: dict[tuple[str, str], Table] = {
    ("bf16", "fp32"): _dispatch_table_bf16.CHOICES,
    ("fp8", "promoted"): _dispatch_table_promoted.CHOICES,
    ("fp8", "fast"): _dispatch_table_fast.CHOICES,
    ("fp8", "block"): _dispatch_table_block.CHOICES,
    ("fp8", "block_swapped"): _dispatch_table_block_swapped.CHOICES,
}

# Compiled, chosen by no row and, on 132 SMs, by the cost model for no usual shape; the tuner tries
# them all the same.
KEPT_FOR_TUNING: frozenset[str] = frozenset(
    {
        "swap_bf16_w64_t16",
        "swap_bf16_w128_t256",
        "swap_fp8p_w128_t128_pair",
        "swap_fp8p_w128_t256",
        "swap_fp8f_w128_t256",
    }
)
