"""The measured choices for FP8 with scales per block; see `_dispatch_table`."""

from __future__ import annotations

from moe_ext._dispatch_rows import PAIRS, Row, rows_of

BLOCK_ROWS: tuple[Row, ...] = (
    *rows_of(
        "fp8",
        "block",
        (
            "swap_fp8b_w64_t16_split2",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (deepseek-v3-tp8, T=1)",
            PAIRS,
            {"max_num_rows": 16, "max_touched_tiles": 80, "min_k": 4000},
        ),
        (
            "swap_fp8b_w64_t16",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (deepseek-v3-tp8, T=1)",
            PAIRS,
            {"max_num_rows": 12, "min_n": 4000, "max_k": 300},
        ),
        (
            "swap_fp8b_w64_t16_deep",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (mixtral-tp4, T=1)",
            PAIRS,
            {"max_num_rows": 4},
        ),
        (
            "swap_fp8b_w128_t16",
            "1.00x the best pair's time: qwen3-next, T=1",
            PAIRS,
            {"max_num_rows": 12, "max_rows_per_group": 0.05, "max_n": 2100, "max_k": 2100},
        ),
        (
            "swap_fp8b_w64_t32",
            "1.01x the best pair's time over 2 pairs, worst 1.02x (qwen3-30b-tp4, T=1)",
            PAIRS,
            {"max_num_rows": 12, "max_n": 2100, "max_k": 2100},
        ),
        (
            "swap_fp8b_w64_t16",
            "1.00x the best pair's time: qwen3.5-397b, T=1",
            PAIRS,
            {"max_num_rows": 12, "max_rows_per_group": 0.05},
        ),
        (
            "swap_fp8b_w128_t16",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (qwen3-235b, T=1)",
            PAIRS,
            {"max_num_rows": 12, "max_rows_per_group": 0.4},
        ),
        (
            "swap_fp8b_w128_t16",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (glm-4.5-air-tp8, T=64)",
            PAIRS,
            {"max_rows_per_group": 6, "max_n": 400, "min_k": 4000},
        ),
        (
            "swap_fp8b_w128_t16",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (glm-4.5-air-tp8, T=64)",
            PAIRS,
            {"max_rows_per_group": 6, "min_n": 4000, "max_k": 200},
        ),
        (
            "swap_fp8b_w64_t16",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (qwen3-30b-tp4, T=4)",
            PAIRS,
            {"max_num_rows": 48, "max_rows_per_group": 1.2, "max_n": 600},
        ),
        (
            "swap_fp8b_w64_t16",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (qwen3-30b-tp4, T=4)",
            PAIRS,
            {"max_num_rows": 48, "max_rows_per_group": 1.2, "max_k": 300},
        ),
        (
            "swap_fp8b_w64_t32",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (qwen3-next, T=4)",
            PAIRS,
            {"max_num_rows": 48, "max_rows_per_group": 1.2, "max_n": 2100, "max_k": 2100},
        ),
        (
            "swap_fp8b_w64_t32",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (gpt-oss-120b, T=64)",
            PAIRS,
            {"max_num_rows": 300, "max_rows_per_group": 6, "min_k": 2500, "max_k": 3000},
        ),
        (
            "swap_fp8b_w64_t32_trio",
            "1.00x the best pair's time over 6 pairs, worst 1.01x (qwen3-235b, T=4)",
            PAIRS,
            {"max_num_rows": 48, "max_rows_per_group": 1.2},
        ),
        (
            "swap_fp8b_w128_t16",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (mixtral-tp4, T=16)",
            PAIRS,
            {"max_num_rows": 64, "max_rows_per_group": 6},
        ),
        (
            "swap_fp8b_w64_t32",
            "1.00x the best pair's time: qwen3-30b-tp4, T=16",
            PAIRS,
            {"max_rows_per_group": 1.2, "max_n": 400},
        ),
        (
            "swap_fp8b_w64_t32",
            "1.00x the best pair's time: qwen3-30b-tp4, T=16",
            PAIRS,
            {"max_rows_per_group": 1.2, "max_k": 200},
        ),
        (
            "swap_fp8b_w128_t128",
            "1.00x the best pair's time over 5 pairs, worst 1.00x (gpt-oss-120b, T=2048)",
            PAIRS,
            {"max_rows_per_group": 100, "min_k": 2500, "max_k": 3000},
        ),
        (
            "swap_fp8b_w128_t64",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (glm-4.5-air-tp8, T=256)",
            PAIRS,
            {"max_rows_per_group": 20, "max_n": 400, "min_k": 4000},
        ),
        (
            "swap_fp8b_w128_t64",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (glm-4.5-air-tp8, T=256)",
            PAIRS,
            {"max_rows_per_group": 20, "min_n": 4000, "max_k": 200},
        ),
        (
            "swap_fp8b_w64_t32_trio",
            "1.00x the best pair's time over 19 pairs, worst 1.00x (qwen3.5-397b, T=128)",
            PAIRS,
            {"max_rows_per_group": 6},
        ),
        (
            "swap_fp8b_w128_t64",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (deepseek-v3-tp8, T=512)",
            PAIRS,
            {"max_rows_per_group": 24, "max_n": 600, "min_k": 5000},
        ),
        (
            "swap_fp8b_w128_t64",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (deepseek-v3-tp8, T=512)",
            PAIRS,
            {"max_rows_per_group": 24, "min_n": 5000, "max_k": 300},
        ),
        (
            "swap_fp8b_w64_t32_trio",
            "1.00x the best pair's time over 4 pairs, worst 1.00x (qwen3-235b, T=128)",
            PAIRS,
            {"max_rows_per_group": 8.5},
        ),
        (
            "swap_fp8b_w64_t32",
            "1.00x the best pair's time: mixtral-tp4, T=64",
            PAIRS,
            {"max_rows_per_group": 24, "max_num_rows": 150, "max_n": 8000, "max_k": 4100},
        ),
        (
            "swap_fp8b_w128_t64",
            "1.00x the best pair's time over 10 pairs, worst 1.01x (qwen3.5-397b, T=1024)",
            PAIRS,
            {"max_rows_per_group": 24},
        ),
        (
            "swap_fp8b_w128_t64",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (qwen3-30b-tp4, T=2048)",
            PAIRS,
            {"max_rows_per_group": 140, "max_n": 400, "max_k": 2100},
        ),
        (
            "swap_fp8b_w128_t64",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (qwen3-30b-tp4, T=2048)",
            PAIRS,
            {"max_rows_per_group": 140, "max_n": 2100, "max_k": 200},
        ),
        (
            "swap_fp8b_w128_t64",
            "1.00x the best pair's time over 2 pairs, worst 1.01x (deepseek-v3-tp8, T=2048)",
            PAIRS,
            {"max_rows_per_group": 100, "max_n": 600, "min_k": 5000},
        ),
        (
            "swap_fp8b_w128_t64",
            "1.00x the best pair's time over 2 pairs, worst 1.01x (deepseek-v3-tp8, T=2048)",
            PAIRS,
            {"max_rows_per_group": 100, "min_n": 5000, "max_k": 300},
        ),
        (
            "swap_fp8b_w128_t64",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (mixtral-tp4, T=128)",
            PAIRS,
            {"max_rows_per_group": 40, "max_num_rows": 300},
        ),
        (
            "swap_fp8b_w128_t128",
            "1.00x the best pair's time over 16 pairs, worst 1.03x (qwen3-30b, T=1024)",
            PAIRS,
            {"max_rows_per_group": 100},
        ),
        (
            "plain_fp8b_w256_t128",
            "1.00x the best pair's time over 28 pairs, worst 1.00x (qwen3.5-397b, T=8192)",
            PAIRS,
            {},
        ),
        (
            "swap_fp8b_w128_t128",
            "1.00x the best pair's time over 7 pairs, worst 1.00x (qwen3-30b-tp4, T=8192)",
            PAIRS,
            {},
        ),
    ),
)
