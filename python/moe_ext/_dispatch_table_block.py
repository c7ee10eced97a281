"""The measured choices for FP8 with scales per block; see `_dispatch_table`."""

from __future__ import annotations

from moe_ext._dispatch_rows import BLOCK_PAIRS, DECODE_PAIRS, PAIRS, Row, rows_of

CHOICES: tuple[Row, ...] = (
    *rows_of(
        "fp8",
        "block",
        (
            "swap_fp8b_rows_w128_t16",
            "1.01x the best pair's time over 6 pairs, worst 1.03x (glm-4.5-air-tp8, T=4)",
            DECODE_PAIRS,
            {"max_rows_per_group": 20, "max_k": 256, "max_k_alignment": 16},
        ),
        (
            "swap_fp8b_w64_t16_split2",
            "1.01x the best pair's time over 2 pairs, worst 1.01x (glm-4.5-air-tp8, T=1)",
            DECODE_PAIRS,
            {"max_num_rows": 16, "max_touched_tiles": 80, "min_k": 4000},
        ),
        (
            "swap_fp8b_w64_t16",
            "1.01x the best pair's time: deepseek-v3-tp8, T=1",
            DECODE_PAIRS,
            {"max_num_rows": 12, "min_n": 4000, "max_k": 300},
        ),
        (
            "swap_fp8b_w64_t16_deep",
            "1.00x the best pair's time over 3 pairs, worst 1.01x (mixtral-tp4, T=1)",
            DECODE_PAIRS,
            {"max_num_rows": 4},
        ),
        (
            "swap_fp8b_w64_t16",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (shard-256, T=1)",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_n": 600},
        ),
        (
            "swap_fp8b_w64_t16",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (shard-256, T=1)",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_k": 300},
        ),
        (
            "swap_fp8b_w128_t16",
            "1.00x the best pair's time: qwen3-next, T=1",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_rows_per_group": 0.05, "max_n": 2100, "max_k": 2100},
        ),
        (
            "swap_fp8b_w64_t32",
            "1.00x the best pair's time: qwen3-30b, T=1",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_n": 2100, "max_k": 2100},
        ),
        (
            "swap_fp8b_w64_t16",
            "1.00x the best pair's time: qwen3.5-397b, T=1",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_rows_per_group": 0.05},
        ),
        (
            "swap_fp8b_w64_t16",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (qwen3-235b, T=1)",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_rows_per_group": 0.1},
        ),
        (
            "swap_fp8b_w128_t16",
            "1.01x the best pair's time: deepseek-v3-ep8, T=1",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_rows_per_group": 0.4},
        ),
        (
            "swap_fp8b_w64_t16",
            "1.01x the best pair's time over 5 pairs, worst 1.03x (glm-4.5-air-tp8, T=4)",
            DECODE_PAIRS,
            {"max_num_rows": 48, "max_rows_per_group": 1.2, "max_n": 600},
        ),
        (
            "swap_fp8b_w64_t16",
            "1.00x the best pair's time over 4 pairs, worst 1.00x (deepseek-v3-tp8, T=4)",
            DECODE_PAIRS,
            {"max_num_rows": 48, "max_rows_per_group": 1.2, "max_k": 300},
        ),
        (
            "swap_fp8b_w64_t32",
            "1.00x the best pair's time over 24 pairs, worst 1.03x (shard-256, T=16)",
            DECODE_PAIRS,
            {"max_rows_per_group": 2},
        ),
        (
            "swap_fp8b_w64_t16",
            "1.00x the best pair's time: glm-4.5-air-tp8, T=64",
            DECODE_PAIRS,
            {"max_rows_per_group": 6, "max_n": 400, "min_k": 4000},
        ),
        (
            "swap_fp8b_w64_t32",
            "1.00x the best pair's time over 24 pairs, worst 1.01x (shard-192, T=128)",
            DECODE_PAIRS,
            {"max_rows_per_group": 9},
        ),
        (
            "swap_fp8b_w64_t16",
            "1.00x the best pair's time: glm-4.5-air-tp8, T=256",
            DECODE_PAIRS,
            {"max_rows_per_group": 24, "max_n": 400, "min_k": 4000},
        ),
        (
            "swap_fp8b_w128_t128",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (gpt-oss-120b, T=2048)",
            PAIRS,
            {"max_rows_per_group": 100, "min_k": 2500, "max_k": 3000},
        ),
        (
            "swap_fp8b_w128_t64",
            "1.00x the best pair's time over 4 pairs, worst 1.01x (shard-192, T=256)",
            DECODE_PAIRS,
            {"max_rows_per_group": 24, "max_n": 600},
        ),
        (
            "swap_fp8b_w128_t64",
            "1.00x the best pair's time over 4 pairs, worst 1.01x (shard-192, T=256)",
            DECODE_PAIRS,
            {"max_rows_per_group": 24, "max_k": 300},
        ),
        (
            "swap_fp8b_w64_t32",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (mixtral-tp4, T=64)",
            DECODE_PAIRS,
            {"max_rows_per_group": 24, "max_num_rows": 150},
        ),
        (
            "swap_fp8b_w128_t64",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (qwen3-next, T=1024)",
            PAIRS,
            {"max_rows_per_group": 24, "max_n": 2100, "max_k": 2100},
        ),
        (
            "swap_fp8b_w128_t128_k128",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (qwen3-30b, T=512)",
            BLOCK_PAIRS,
            {
                "min_rows_per_group": 25,
                "max_rows_per_group": 40,
                "min_num_rows": 3000,
                "min_n": 1000,
                "max_n": 4100,
                "min_k": 500,
                "max_k": 4100,
            },
        ),
        (
            "swap_fp8b_w128_t128",
            "1.00x the best pair's time over 5 pairs, worst 1.00x (glm-4.5-air, T=256)",
            DECODE_PAIRS,
            {"max_rows_per_group": 24},
        ),
        (
            "swap_fp8b_w128_t128_k128",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (glm-4.5-air-tp8, T=512)",
            PAIRS,
            {"max_n": 400, "min_k": 4000},
        ),
        (
            "swap_fp8b_w128_t128_k128",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (glm-4.5-air-tp8, T=512)",
            PAIRS,
            {"max_rows_per_group": 100, "min_n": 4000, "max_k": 200},
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
            "1.00x the best pair's time: mixtral-tp4, T=128",
            DECODE_PAIRS,
            {"max_rows_per_group": 40, "max_num_rows": 300, "max_n": 8000, "max_k": 4100},
        ),
        (
            "swap_fp8b_w128_t128",
            "1.00x the best pair's time over 17 pairs, worst 1.03x (qwen3-30b, T=1024)",
            DECODE_PAIRS,
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
