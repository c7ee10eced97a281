"""The measured choices, by the operands of a GEMM.

What is compiled (csrc/grouped_gemm/configs.def) and what is chosen (the modules named here) are two
lists on purpose. The modules named here hold the measured problems that `bench/tune_tables.py`
writes; where there is none, the cost model of `_dispatch` decides.
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

TABLES: dict[tuple[str, str], Measured] = {
    ("bf16", "fp32"): _dispatch_table_bf16.CHOICES,
    ("fp8", "promoted"): _dispatch_table_promoted.CHOICES,
    ("fp8", "fast"): _dispatch_table_fast.CHOICES,
    ("fp8", "block"): _dispatch_table_block.CHOICES,
    ("fp8", "block_swapped"): _dispatch_table_block_swapped.CHOICES,
}

# Before measured problems: kernels for few K, whose times no estimate knows; by the way to sum. The
# second GEMM of a pair gets another kernel than the first then, which costs as much as it saves for
# most: these are the sizes where it saves more.
WHOLE_ROWS: dict[str, tuple[Row, ...]] = {
    accumulate: tuple(
        rows_of(
            "fp8",
            accumulate,
            (
                kernel,
                "0.91 to 0.98 of the best single kernel's time for the pair (glm-4.5-air-tp8)",
                DECODE_PAIRS,
                {
                    "min_rows_per_group": least,
                    "max_rows_per_group": 20,
                    "min_weight_tiles": 6000,
                    "min_n": 4096,
                    "max_n": 4096,
                    "min_k": 160,
                    "max_k": 192,
                    "max_k_alignment": 16,
                },
            ),
        )
    )
    for accumulate, kernel, least in (
        ("promoted", "swap_fp8p_rows_w128_t16", 0),
        ("block", "swap_fp8b_rows_w128_t16", 0.5),
    )
}

# Compiled, the best of no measured problem: the tuner tries them all the same.
KEPT_FOR_TUNING: frozenset[str] = frozenset(
    {
        "swap_fp8f_w128_t128_pair",
        "swap_fp8f_w128_t256",
        "swap_fp8p_w128_t128_pair",
        "swap_fp8p_w128_t256",
    }
)
