"""The measured choices for FP8 whose sums stay in the tensor core; see `_dispatch_table`."""

from __future__ import annotations

from moe_ext._dispatch_rows import PREFILL, SINGLES, Row, rows_of

CHOICES: tuple[Row, ...] = (
    *rows_of(
        "fp8",
        "fast",
        (
            "swap_fp8f_w64_t32",
            "1.01x the best kernel's time over 25 cells, worst 1.06x",
            SINGLES,
            {"max_rows_per_group": 0.3, "max_touched_tiles": 800, "min_k": 512},
        ),
        (
            "swap_fp8f_w64_t32",
            "1.00x the best kernel's time over 2 cells, worst 1.00x",
            SINGLES,
            {"max_rows_per_group": 1.1, "max_n": 384, "min_k": 1024},
        ),
        (
            "swap_fp8f_w128_t64",
            "1.01x the best kernel's time over 91 cells, worst 1.06x",
            SINGLES,
            {"max_rows_per_group": 24},
        ),
        (
            "swap_fp8f_w128_t128_pair",
            "1.02x the best kernel's time over 28 cells, worst 1.11x",
            SINGLES,
            {"max_rows_per_group": 100, "max_n": 384},
        ),
        (
            "swap_fp8f_w256_t128",
            "1.01x the best kernel's time over 10 cells, worst 1.04x",
            PREFILL,
            {"max_rows_per_group": 100, "min_k": 700},
        ),
        (
            "swap_fp8f_w128_t128_pair",
            "1.02x the best kernel's time over 28 cells, worst 1.11x",
            SINGLES,
            {"max_rows_per_group": 100},
        ),
        (
            "plain_fp8f_w256_t128",
            "1.00x the best kernel's time over 6 cells, worst 1.00x",
            SINGLES,
            {"max_k": 600},
        ),
        (
            "swap_fp8f_w128_t128_pair",
            "1.05x the best kernel's time over 4 cells, worst 1.11x",
            SINGLES,
            {"max_n": 384},
        ),
        (
            "swap_fp8f_w192_t128",
            "1.03x the best kernel's time over 7 cells, worst 1.08x",
            PREFILL,
            {"max_num_rows": 4096, "max_n": 4096},
        ),
        (
            "swap_fp8f_w256_t128",
            "1.02x the best kernel's time over 14 cells, worst 1.11x",
            SINGLES,
            {"max_rows_per_group": 600, "max_num_rows": 16384},
        ),
        (
            "plain_fp8f_w256_t128",
            "1.00x the best kernel's time over 18 cells, worst 1.01x",
            SINGLES,
            {},
        ),
    ),
)
