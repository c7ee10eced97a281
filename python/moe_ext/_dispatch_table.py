"""The measured choices, by the operands of a GEMM.

What is compiled (csrc/grouped_gemm/configs.def) and what is chosen (the modules named here) are two
lists on purpose. Every choice says what it was measured with; where there is none, the cost model
of `_dispatch` decides. A module holds rows of limits, of which the first match wins, or the
measured problems that `bench/tune_tables.py` writes.
"""

from __future__ import annotations

from moe_ext import (
    _dispatch_table_bf16,
    _dispatch_table_block,
    _dispatch_table_block_swapped,
    _dispatch_table_fast,
    _dispatch_table_promoted,
)
from moe_ext._dispatch_measured import Measured
from moe_ext._dispatch_rows import DECODE_PAIRS, Row, rows_of

Table = tuple[Row, ...] | Measured

TABLES: dict[tuple[str, str], Table] = {
    ("bf16", "fp32"): _dispatch_table_bf16.CHOICES,
    ("fp8", "promoted"): _dispatch_table_promoted.CHOICES,
    ("fp8", "fast"): _dispatch_table_fast.CHOICES,
    ("fp8", "block"): _dispatch_table_block.CHOICES,
    ("fp8", "block_swapped"): _dispatch_table_block_swapped.CHOICES,
}

# Before measured problems: kernels for few K, whose times no estimate knows; by the way to sum.
WHOLE_ROWS: dict[str, tuple[Row, ...]] = {
    accumulate: tuple(
        rows_of(
            "fp8",
            accumulate,
            (
                kernel,
                "1.01x the best pair's time over 6 pairs, worst 1.03x (glm-4.5-air-tp8, T=4)",
                DECODE_PAIRS,
                {"max_rows_per_group": 20, "max_k": 256, "max_k_alignment": 16},
            ),
        )
    )
    for accumulate, kernel in (
        ("promoted", "swap_fp8p_rows_w128_t16"),
        ("block", "swap_fp8b_rows_w128_t16"),
    )
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
