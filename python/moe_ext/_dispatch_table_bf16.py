"""The measured choices for BF16; see `_dispatch_table`."""

from __future__ import annotations

from moe_ext._dispatch_rows import DECODE_PAIRS, PAIRS, PREFILL, SINGLES, Row, rows_of

CHOICES: tuple[Row, ...] = (
    *rows_of(
        "bf16",
        "fp32",
        (
            "swap_bf16_w64_t16_split2",
            "1.01x the best pair's time over 3 pairs, worst 1.02x (deepseek-v3-tp8, T=1)",
            DECODE_PAIRS,
            {"max_num_rows": 16, "max_touched_tiles": 80, "min_k": 1024},
        ),
        (
            "swap_bf16_w128_t16",
            "1.01x the best pair's time over 2 pairs, worst 1.02x (deepseek-v3-tp8, T=1)",
            DECODE_PAIRS,
            {"max_num_rows": 12, "min_n": 4000, "max_k": 300},
        ),
        (
            "swap_bf16_w128_t16",
            "1.00x the best pair's time: qwen3-30b-tp4, T=1",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_k": 200},
        ),
        (
            "swap_bf16_w64_t16_deep",
            "1.00x the best pair's time over 3 pairs, worst 1.01x (mixtral-tp4, T=1)",
            DECODE_PAIRS,
            {"max_num_rows": 4},
        ),
        (
            "swap_bf16_w64_t32",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (qwen3-next, T=1)",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_n": 2100, "max_k": 2100},
        ),
        (
            "swap_bf16_w64_t32_trio",
            "1.02x the best pair's time: qwen3.5-397b, T=1",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_rows_per_group": 0.05},
        ),
        (
            "swap_bf16_w64_t16",
            "1.02x the best pair's time over 2 pairs, worst 1.02x (glm-4.5-air, T=1)",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_rows_per_group": 0.1},
        ),
        (
            "swap_bf16_w128_t16",
            "1.01x the best pair's time: deepseek-v3-ep8, T=1",
            DECODE_PAIRS,
            {"max_num_rows": 12, "max_rows_per_group": 0.4},
        ),
        (
            "swap_bf16_w64_t32",
            "1.00x the best pair's time over 25 pairs, worst 1.04x (glm-4.5-air-tp8, T=16)",
            DECODE_PAIRS,
            {"max_rows_per_group": 2},
        ),
        (
            "swap_bf16_w64_t32_trio",
            "1.00x the best pair's time over 4 pairs, worst 1.00x (qwen3-30b-tp4, T=128)",
            DECODE_PAIRS,
            {"max_rows_per_group": 9, "max_n": 400},
        ),
        (
            "swap_bf16_w64_t32_trio",
            "1.00x the best pair's time over 4 pairs, worst 1.00x (qwen3-30b-tp4, T=128)",
            DECODE_PAIRS,
            {"max_rows_per_group": 9, "max_k": 200},
        ),
        (
            "swap_bf16_w64_t32",
            "1.00x the best pair's time over 17 pairs, worst 1.00x (qwen3-235b, T=64)",
            DECODE_PAIRS,
            {"max_rows_per_group": 9},
        ),
        (
            "swap_bf16_w128_t64",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (qwen3-30b-tp4, T=256)",
            DECODE_PAIRS,
            {"max_rows_per_group": 24, "max_n": 400},
        ),
        (
            "swap_bf16_w128_t64",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (qwen3-30b-tp4, T=256)",
            DECODE_PAIRS,
            {"max_rows_per_group": 24, "max_k": 200},
        ),
        (
            "swap_bf16_w64_t32",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (mixtral-tp4, T=64)",
            DECODE_PAIRS,
            {"max_rows_per_group": 20, "max_num_rows": 150},
        ),
        (
            "swap_bf16_w128_t64",
            "1.00x the best pair's time: mixtral-tp4, T=128",
            DECODE_PAIRS,
            {"max_rows_per_group": 40, "max_num_rows": 300, "max_n": 8000, "max_k": 4100},
        ),
        (
            "swap_bf16_w128_t128",
            "1.01x the best pair's time over 5 pairs, worst 1.03x (gpt-oss-120b, T=512)",
            DECODE_PAIRS,
            {"max_rows_per_group": 24, "max_num_rows": 2100},
        ),
        (
            "swap_bf16_w128_t64",
            "1.00x the best kernel's time over 24 cells, worst 1.02x",
            SINGLES,
            {"max_rows_per_group": 24},
        ),
        (
            "swap_bf16_w128_t128",
            "1.01x the best pair's time over 3 pairs, worst 1.02x (mixtral-tp4, T=256)",
            DECODE_PAIRS,
            {"max_rows_per_group": 70, "max_num_rows": 600},
        ),
        (
            "swap_bf16_w128_t128_pair",
            "1.01x the best kernel's time over 28 cells, worst 1.04x",
            SINGLES,
            {"max_rows_per_group": 100, "max_n": 400},
        ),
        (
            "swap_bf16_w128_t128_pair",
            "1.01x the best kernel's time over 28 cells, worst 1.04x",
            SINGLES,
            {"max_rows_per_group": 100, "max_k": 200},
        ),
        (
            "swap_bf16_w128_t128",
            "1.00x the best pair's time over 4 pairs, worst 1.00x (qwen3-next, T=4096)",
            PAIRS,
            {"max_rows_per_group": 100, "max_n": 1100},
        ),
        (
            "swap_bf16_w128_t128",
            "1.00x the best pair's time over 4 pairs, worst 1.00x (qwen3-next, T=4096)",
            PAIRS,
            {"max_rows_per_group": 100, "max_k": 600},
        ),
        (
            "swap_bf16_w192_t128",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (gpt-oss-120b, T=2048)",
            PAIRS,
            {"max_rows_per_group": 100, "min_k": 2500, "max_k": 3000},
        ),
        (
            "swap_bf16_w256_t128",
            "1.01x the best kernel's time over 10 cells, worst 1.04x",
            PREFILL,
            {"max_rows_per_group": 100},
        ),
        (
            "swap_bf16_w192_t128",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (mixtral-tp4, T=512)",
            PAIRS,
            {"max_rows_per_group": 140, "max_num_rows": 4100},
        ),
        (
            "swap_bf16_w192_t128",
            "1.00x the best pair's time over 2 pairs, worst 1.00x (mixtral-tp4, T=1024)",
            PAIRS,
            {"max_rows_per_group": 300, "max_num_rows": 2100},
        ),
        (
            "swap_bf16_w192_t128",
            "1.00x the best pair's time over 4 pairs, worst 1.00x (qwen3-30b-tp4, T=4096)",
            PAIRS,
            {"max_rows_per_group": 700, "max_n": 400},
        ),
        (
            "swap_bf16_w192_t128",
            "1.00x the best pair's time over 4 pairs, worst 1.00x (qwen3-30b-tp4, T=4096)",
            PAIRS,
            {"max_rows_per_group": 700, "max_k": 200},
        ),
        (
            "swap_bf16_w256_t128",
            "1.01x the best pair's time over 12 pairs, worst 1.03x (gpt-oss-120b, T=4096)",
            PAIRS,
            {"max_rows_per_group": 700},
        ),
        (
            "plain_bf16_w256_t128",
            "1.00x the best pair's time over 3 pairs, worst 1.00x (mixtral-tp4, T=4096)",
            PAIRS,
            {},
        ),
    ),
)
