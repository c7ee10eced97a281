"""The measured choices for promoted FP8, scales constant along K; see `_dispatch_table`."""

from __future__ import annotations

from moe_ext._dispatch_rows import DECODE_PAIRS, PAIRS, Row, rows_of

CHOICES: tuple[Row, ...] = (
    *rows_of(
        "fp8",
        "promoted",
        (
            "swap_fp8p_rows_w128_t16",
            "1.01x the best pair's time over 6 pairs, worst 1.03x (glm-4.5-air-tp8, T=4)",
            DECODE_PAIRS,
            {"max_rows_per_group": 20, "max_k": 256, "max_k_alignment": 16},
        ),
        (
            "swap_fp8p_w64_t16_split2",
            "1.01x the best pair's time over 2 pairs, worst 1.03x (glm-4.5-air-tp8, T=1)",
            DECODE_PAIRS,
            {"max_num_rows": 16, "max_touched_tiles": 80, "min_k": 4000},
        ),
        (
            "swap_fp8p_w64_t16",
            "1.00x the best pair's time: deepseek-v3-tp8, T=1",
            DECODE_PAIRS,
            {"max_num_rows": 12, "min_n": 4000, "max_k": 300},
        ),
        (
            "swap_fp8p_w64_t16_deep",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (mixtral-tp4, T=1)",
            DECODE_PAIRS,
            {"max_num_rows": 4},
        ),
        (
            "swap_fp8p_w64_t16",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (shard-256, T=1)",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_n": 600},
        ),
        (
            "swap_fp8p_w64_t16",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (shard-256, T=1)",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_k": 300},
        ),
        (
            "swap_fp8p_w128_t16",
            "1.00x the best pair's time: qwen3-next, T=1",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_rows_per_group": 0.05, "max_n": 2100, "max_k": 2100},
        ),
        (
            "swap_fp8p_w64_t32",
            "1.00x the best pair's time: qwen3-30b, T=1",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_n": 2100, "max_k": 2100},
        ),
        (
            "swap_fp8p_w64_t16",
            "1.00x the best pair's time: qwen3.5-397b, T=1",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_rows_per_group": 0.05},
        ),
        (
            "swap_fp8p_w64_t16",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (qwen3-235b, T=1)",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_rows_per_group": 0.1},
        ),
        (
            "swap_fp8p_w128_t16",
            "1.00x the best pair's time: deepseek-v3-ep8, T=1",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_rows_per_group": 0.4},
        ),
        (
            "swap_fp8p_w64_t16",
            "1.01x the best pair's time over 5 pairs, worst 1.03x (glm-4.5-air-tp8, T=4)",
            DECODE_PAIRS,
            {"max_num_rows": 48, "max_rows_per_group": 1.2, "max_n": 600},
        ),
        (
            "swap_fp8p_w64_t16",
            "1.00x the best pair's time over 4 pairs, worst 1.00x (shard-256, T=4)",
            DECODE_PAIRS,
            {"max_num_rows": 48, "max_rows_per_group": 1.2, "max_k": 300},
        ),
        (
            "swap_fp8p_w64_t32",
            "1.00x the best pair's time over 24 pairs, worst 1.03x (shard-256, T=16)",
            DECODE_PAIRS,
            {"max_rows_per_group": 2},
        ),
        (
            "swap_fp8p_w64_t32_trio",
            "1.00x the best pair's time over 4 pairs, worst 1.00x (shard-192, T=128)",
            DECODE_PAIRS,
            {"max_rows_per_group": 9, "max_n": 400, "max_k": 2100},
        ),
        (
            "swap_fp8p_w64_t32_trio",
            "1.00x the best pair's time over 4 pairs, worst 1.00x (shard-192, T=128)",
            DECODE_PAIRS,
            {"max_rows_per_group": 9, "max_n": 2100, "max_k": 200},
        ),
        (
            "swap_fp8p_w64_t32",
            "1.00x the best pair's time over 21 pairs, worst 1.02x (shard-256, T=128)",
            DECODE_PAIRS,
            {"max_rows_per_group": 9},
        ),
        (
            "swap_fp8p_w128_t128",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (gpt-oss-120b, T=2048)",
            PAIRS,
            {"max_rows_per_group": 100, "min_k": 2500, "max_k": 3000},
        ),
        (
            "swap_fp8p_w128_t64",
            "1.00x the best pair's time over 5 pairs, worst 1.00x (shard-256, T=256)",
            DECODE_PAIRS,
            {"max_rows_per_group": 24, "max_n": 600},
        ),
        (
            "swap_fp8p_w128_t64",
            "1.00x the best pair's time over 4 pairs, worst 1.00x (shard-256, T=256)",
            DECODE_PAIRS,
            {"max_rows_per_group": 24, "max_k": 300},
        ),
        (
            "swap_fp8p_w64_t32",
            "1.00x the best pair's time over 2 pairs, worst 1.01x (mixtral, T=64)",
            DECODE_PAIRS,
            {"max_rows_per_group": 24, "max_num_rows": 150},
        ),
        (
            "swap_fp8p_w128_t128",
            "1.00x the best pair's time over 8 pairs, worst 1.01x (qwen3.5-397b, T=512)",
            DECODE_PAIRS,
            {"max_rows_per_group": 24},
        ),
        (
            "swap_fp8p_w128_t64",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (qwen3-30b-tp4, T=1024)",
            PAIRS,
            {"max_rows_per_group": 100, "max_n": 400, "max_k": 2100},
        ),
        (
            "swap_fp8p_w128_t64",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (qwen3-30b-tp4, T=1024)",
            PAIRS,
            {"max_rows_per_group": 100, "max_n": 2100, "max_k": 200},
        ),
        (
            "swap_fp8p_w128_t64",
            "1.00x the best pair's time: mixtral-tp4, T=128",
            DECODE_PAIRS,
            {"max_rows_per_group": 40, "max_num_rows": 300, "max_n": 8000, "max_k": 4100},
        ),
        (
            "swap_fp8p_w128_t128",
            "1.00x the best pair's time over 19 pairs, worst 1.00x (qwen3.5-397b, T=4096)",
            DECODE_PAIRS,
            {"max_rows_per_group": 100},
        ),
        (
            "swap_fp8p_w128_t128",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (mixtral-tp4, T=512)",
            PAIRS,
            {"max_rows_per_group": 140, "max_num_rows": 2100},
        ),
        (
            "swap_fp8p_w128_t128",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (qwen3-30b-tp4, T=2048)",
            PAIRS,
            {"max_rows_per_group": 140, "max_n": 2100, "max_k": 2100},
        ),
        (
            "swap_fp8p_w192_t128",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (gpt-oss-120b, T=8192)",
            PAIRS,
            {"max_rows_per_group": 300, "min_k": 2500, "max_k": 3000},
        ),
        (
            "swap_fp8p_w256_t128",
            "1.01x the best pair's time over 5 pairs, worst 1.02x (deepseek-v3-tp8, T=4096)",
            PAIRS,
            {"max_rows_per_group": 140},
        ),
        (
            "swap_fp8p_w256_t128",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (qwen3-next, T=8192)",
            PAIRS,
            {"max_rows_per_group": 300, "min_n": 1000, "max_n": 2100, "min_k": 400, "max_k": 2100},
        ),
        (
            "plain_fp8p_w256_t128",
            "1.00x the best pair's time: qwen3-30b, T=8192",
            PAIRS,
            {"min_n": 1000, "max_n": 2100, "min_k": 400, "max_k": 2100},
        ),
        (
            "plain_fp8p_w256_t128",
            "1.04x the best pair's time: deepseek-v3-tp8, T=8192",
            PAIRS,
            {"max_n": 600, "min_k": 5000},
        ),
        (
            "plain_fp8p_w256_t128",
            "1.04x the best pair's time: deepseek-v3-tp8, T=8192",
            PAIRS,
            {"min_n": 5000, "max_k": 300},
        ),
        (
            "swap_fp8p_w256_t128",
            "1.00x the best pair's time: qwen3.5-397b, T=8192",
            PAIRS,
            {"max_rows_per_group": 200},
        ),
        (
            "swap_fp8p_w192_t128",
            "1.00x the best pair's time over 12 pairs, worst 1.00x (qwen3-30b-tp4, T=8192)",
            PAIRS,
            {"max_rows_per_group": 700},
        ),
        (
            "plain_fp8p_w256_t128",
            "1.00x the best pair's time over 6 pairs, worst 1.00x (mixtral-tp4, T=8192)",
            PAIRS,
            {},
        ),
    ),
)
