"""The measured choices for FP8 with scales per block; see `_dispatch_table`."""

from __future__ import annotations

from moe_ext._dispatch_rows import Row, rows_of

_BLOCK = "bench/results/tuning-block-2026-11-29.jsonl"
# Both GEMMs of a layer: one kernel for both is 3 to 9 us faster at few tokens than two different
# ones (docs/notes/cold-code.md).
_BLOCK_PAIRS = "bench/results/probes/block-pairs-2026-11-29.jsonl"
_BLOCK_STAGES = "bench/results/tuning-block-stages-2026-11-29.jsonl"

BLOCK_ROWS: tuple[Row, ...] = (
    *rows_of(
        "fp8",
        "block",
        (
            "swap_fp8b_w64_t16_split2",
            "deepseek-v3-tp8 gate/up, T=1: 24.0 us the pair; w64_t16 for both 25.6",
            _BLOCK_PAIRS,
            {"max_touched_tiles": 100, "min_k": 4000},
        ),
        (
            "swap_fp8b_w128_t16",
            "its down GEMM",
            _BLOCK_PAIRS,
            {"max_num_rows": 12, "min_n": 4000, "max_k": 300},
        ),
        (
            "swap_fp8b_w64_t16_deep",
            "mixtral gate/up, T=1: 92.2 us the pair; w64_t32 100.1",
            _BLOCK_PAIRS,
            {"max_num_rows": 2, "min_n": 16000},
        ),
        (
            "swap_fp8b_w64_t16_deep",
            "mixtral down, T=1",
            _BLOCK_PAIRS,
            {"max_num_rows": 2, "min_k": 10000},
        ),
        (
            "swap_fp8b_w64_t32",
            "mixtral-tp4, T=1: 27.5 us; w64_t16 27.7, w128_t16 29.7",
            _BLOCK_PAIRS,
            {"max_num_rows": 2},
        ),
        (
            "swap_fp8b_w64_t16",
            "qwen3-30b-tp4 gate/up, T=1: 9.8 us the pair; w64_t32 10.6",
            _BLOCK_PAIRS,
            {"max_num_rows": 12, "max_n": 400},
        ),
        (
            "swap_fp8b_w64_t16",
            "qwen3-30b-tp4 down, T=1",
            _BLOCK_PAIRS,
            {"max_num_rows": 12, "max_k": 200},
        ),
        (
            "swap_fp8b_w64_t32_trio",
            "mixtral gate/up, T=4: 204.3 us the pair; w64_t16 214.0",
            _BLOCK_PAIRS,
            {"max_num_rows": 12, "min_n": 16000},
        ),
        (
            "swap_fp8b_w64_t32_trio",
            "mixtral down, T=4",
            _BLOCK_PAIRS,
            {"max_num_rows": 12, "min_k": 10000},
        ),
        (
            "swap_fp8b_w64_t32_trio",
            "mixtral-tp4 gate/up, T=4: 59.3 us the pair; w64_t16 59.2, w128_t16 63.3",
            _BLOCK_PAIRS,
            {"max_num_rows": 12, "min_n": 7000, "min_k": 4000},
        ),
        (
            "swap_fp8b_w64_t32_trio",
            "mixtral-tp4 down, T=4",
            _BLOCK_PAIRS,
            {"max_num_rows": 12, "min_n": 4000, "min_k": 3000, "max_k": 4000},
        ),
        (
            "swap_fp8b_w64_t32",
            "qwen3-30b, T=1: 14.6 us; w64_t16 14.8, w128_t16 15.5",
            _BLOCK_PAIRS,
            {"max_num_rows": 8, "max_n": 2100, "max_k": 2100},
        ),
        (
            "swap_fp8b_w128_t16",
            "qwen3-next, T=1: 17.1 us; w64_t16 17.7",
            _BLOCK_PAIRS,
            {"max_num_rows": 12, "max_n": 2100, "max_k": 2100},
        ),
        (
            "swap_fp8b_w64_t16",
            "qwen3.5-397b gate/up, T=1: 36.9 us the pair; w64_t32_trio 37.3, w128_t16 38.9",
            _BLOCK_PAIRS,
            {"max_num_rows": 12, "max_n": 2100},
        ),
        (
            "swap_fp8b_w64_t16",
            "qwen3.5-397b down, T=1",
            _BLOCK_PAIRS,
            {"max_num_rows": 12, "max_k": 1100},
        ),
        (
            "swap_fp8b_w64_t32",
            "gpt-oss-120b, T=1: 32.4 us; w64_t32_trio 32.7",
            _BLOCK_PAIRS,
            {"max_num_rows": 4},
        ),
        (
            "swap_fp8b_w128_t16",
            "qwen3-235b, T=1: 40.5 us; w64_t32_trio 41.2; deepseek-v3-ep8: 86.0; w64_t32 90.1",
            _BLOCK_PAIRS,
            {"max_num_rows": 12},
        ),
        (
            "swap_fp8b_w64_t16",
            "qwen3-30b, T=4: 35.2 us; w64_t32 35.0, w128_t16 37.5",
            _BLOCK_PAIRS,
            {"max_num_rows": 48, "max_rows_per_group": 1.2, "max_n": 2100, "max_k": 2100},
        ),
        (
            "swap_fp8b_w64_t16",
            "deepseek-v3-tp8 gate/up, T=4: 45.2 us the pair; w64_t32 45.8, w128_t16 46.3",
            _BLOCK_PAIRS,
            {"max_num_rows": 48, "max_rows_per_group": 1.2, "max_n": 600},
        ),
        (
            "swap_fp8b_w64_t16",
            "deepseek-v3-tp8 down, T=4",
            _BLOCK_PAIRS,
            {"max_num_rows": 48, "max_rows_per_group": 1.2, "max_k": 300},
        ),
        (
            "swap_fp8b_w128_t16",
            "1.01x the best kernel's time over 10 pairs, worst 1.03x",
            _BLOCK,
            {"max_rows_per_group": 6},
        ),
        (
            "swap_fp8b_w128_t128",
            "gpt-oss-120b, T=1024: 540 and 277 us; w128_t64 558 and 285",
            _BLOCK_STAGES,
            {"max_rows_per_group": 100, "min_k": 2500, "max_k": 3000},
        ),
        (
            "swap_fp8b_w128_t64",
            "1.00x the best kernel's time over 6 pairs, worst 1.00x",
            _BLOCK,
            {"max_rows_per_group": 24},
        ),
        (
            "swap_fp8b_w128_t64",
            "mixtral, T=128: 342.5 us; w128_t128 348.7, plain 366.9",
            _BLOCK_PAIRS,
            {"max_rows_per_group": 40, "max_num_rows": 300},
        ),
        (
            "plain_fp8b_w256_t128",
            "mixtral, T=256: 368.9 us; w128_t128 383.4",
            _BLOCK,
            {"max_rows_per_group": 100, "max_num_rows": 600},
        ),
        (
            "swap_fp8b_w128_t128",
            "deepseek-v3-ep8, T=256: 413.0 us; w128_t64 424.3",
            _BLOCK,
            {"max_rows_per_group": 100, "max_num_rows": 3000},
        ),
        (
            "swap_fp8b_w128_t64",
            "1.00x the best kernel's time over 4 pairs, worst 1.01x",
            _BLOCK,
            {"max_rows_per_group": 100},
        ),
        ("plain_fp8b_w256_t128", "qwen3-30b, T=8192: 666 us; w128_t128 955", _BLOCK, {}),
        (
            "swap_fp8b_w128_t64",
            "glm-4.5-air-tp8, whose blocks no plain kernel takes, T=8192: 756 us; w128_t128 803",
            _BLOCK,
            {},
        ),
    ),
)
