"""The measured choices: the compiled kernel for each range of sizes. First match wins.

What is compiled (csrc/grouped_gemm/configs.def) and what is chosen (here) are two lists on
purpose. Each row says what it was measured with; where no row matches, the cost model of
`_dispatch` decides.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Row(NamedTuple):
    """A choice for the problems within all of its limits; a limit not given does not limit.

    `rows_per_group` is num_rows / num_groups, an average: the host knows no more than that.
    `touched_tiles` counts the 64-row weight tiles that the rows can touch at most: how many CTAs
    can be busy when each row has a group of its own.
    """

    dtype: str
    accumulate: str
    config: str
    measurement: str
    max_rows_per_group: float = math.inf
    max_num_rows: float = math.inf
    max_touched_tiles: float = math.inf
    min_n: int = 0
    max_n: float = math.inf
    min_k: int = 0
    max_k: float = math.inf
    sm_count: int = 132

    def matches(self, num_rows: int, num_groups: int, n: int, k: int, sm_count: int) -> bool:
        """Whether a problem lies within the row's limits."""
        return (
            num_rows <= self.max_rows_per_group * num_groups
            and num_rows <= self.max_num_rows
            and min(num_rows, num_groups) * ((n + 63) // 64) <= self.max_touched_tiles
            and self.min_n <= n <= self.max_n
            and self.min_k <= k <= self.max_k
            and sm_count == self.sm_count
        )


_TUNING = "bench/results/tuning-2026-11-29.jsonl"
_PREFILL = "bench/results/tuning-prefill-2026-11-29.jsonl"
_BLOCK = "bench/results/tuning-block-2026-11-29.jsonl"
_BLOCK_STAGES = "bench/results/tuning-block-stages-2026-11-29.jsonl"
_NOT_KEPT = "its rows were not kept"


_Choice = tuple[str, str, str, dict[str, float]]
"""Kernel, what was measured, the file that holds it, and limits of `Row`."""


def _rows(dtype: str, accumulate: str, *choices: _Choice) -> list[Row]:
    """Make the rows of one kind of operands; each says where its measurement is."""
    return [
        Row(dtype, accumulate, config, f"{result}; H200, zipf0.6, {where}", **limits)  # type: ignore[arg-type]
        for config, result, where, limits in choices
    ]


TABLE: tuple[Row, ...] = (
    *_rows(
        "bf16",
        "fp32",
        (
            "swap_bf16_w64_t16_split2",
            "1.00x the best kernel's time over 3 cells, worst 1.00x",
            _TUNING,
            {"max_num_rows": 16, "max_touched_tiles": 80, "min_k": 1024},
        ),
        (
            "swap_bf16_w64_t16_deep",
            "1.02x the best kernel's time over 2 cells, worst 1.04x",
            _TUNING,
            {"max_num_rows": 16, "max_touched_tiles": 132, "min_k": 2048},
        ),
        (
            "swap_bf16_w128_t16",
            "1.03x the best kernel's time over 11 cells, worst 1.08x",
            _TUNING,
            {"max_num_rows": 12, "max_touched_tiles": 400},
        ),
        (
            "swap_bf16_w64_t32_trio",
            "mixtral pair, T=4: 423 us bf16, 213 us fp8; w64_t16 431, 221",
            _NOT_KEPT,
            {"max_num_rows": 16, "max_touched_tiles": 800, "min_k": 3000},
        ),
        (
            "swap_bf16_w128_t16",
            "1.01x the best kernel's time over 9 cells, worst 1.06x",
            _TUNING,
            {"max_num_rows": 12},
        ),
        (
            "swap_bf16_w64_t16",
            "1.03x the best kernel's time over 8 cells, worst 1.07x",
            _TUNING,
            {"max_rows_per_group": 0.3, "max_touched_tiles": 1100},
        ),
        (
            "swap_bf16_w128_t16",
            "1.00x the best kernel's time over 58 cells, worst 1.03x",
            _TUNING,
            {"max_rows_per_group": 6},
        ),
        (
            "swap_bf16_w128_t64",
            "1.00x the best kernel's time over 24 cells, worst 1.02x",
            _TUNING,
            {"max_rows_per_group": 24},
        ),
        (
            "swap_bf16_w128_t128_pair",
            "1.01x the best kernel's time over 28 cells, worst 1.04x",
            _TUNING,
            {"max_rows_per_group": 100, "max_n": 384},
        ),
        (
            "swap_bf16_w256_t128",
            "1.01x the best kernel's time over 10 cells, worst 1.04x",
            _PREFILL,
            {"max_rows_per_group": 100, "min_k": 700},
        ),
        (
            "swap_bf16_w128_t128_pair",
            "1.01x the best kernel's time over 28 cells, worst 1.04x",
            _TUNING,
            {"max_rows_per_group": 100},
        ),
        (
            "plain_bf16_w256_t128",
            "1.00x the best kernel's time over 5 cells, worst 1.00x",
            _TUNING,
            {"max_k": 300},
        ),
        (
            "swap_bf16_w128_t128_pair",
            "1.05x the best kernel's time over 4 cells, worst 1.13x",
            _TUNING,
            {"max_n": 384},
        ),
        (
            "swap_bf16_w192_t128",
            "1.00x the best kernel's time over 7 cells, worst 1.01x",
            _PREFILL,
            {"max_num_rows": 4096, "max_n": 4096},
        ),
        (
            "swap_bf16_w256_t128",
            "1.01x the best kernel's time over 10 cells, worst 1.08x",
            _TUNING,
            {"max_rows_per_group": 200},
        ),
        (
            "swap_bf16_w256_t128",
            "1.01x the best kernel's time over 8 cells, worst 1.08x",
            _TUNING,
            {"max_rows_per_group": 600, "max_num_rows": 16384},
        ),
        (
            "plain_bf16_w256_t128",
            "1.03x the best kernel's time over 15 cells, worst 1.17x",
            _TUNING,
            {},
        ),
    ),
    *_rows(
        "fp8",
        "promoted",
        (
            "swap_fp8p_w64_t16_split2",
            "1.00x the best kernel's time over 3 cells, worst 1.00x",
            _TUNING,
            {"max_num_rows": 16, "max_touched_tiles": 80, "min_k": 1024},
        ),
        (
            "swap_fp8p_w64_t16_deep",
            "1.04x the best kernel's time over 2 cells, worst 1.04x",
            _TUNING,
            {"max_num_rows": 16, "max_touched_tiles": 132, "min_k": 2048},
        ),
        (
            "swap_fp8p_w64_t16",
            "1.02x the best kernel's time over 11 cells, worst 1.13x",
            _TUNING,
            {"max_num_rows": 12, "max_touched_tiles": 400},
        ),
        (
            "swap_fp8p_w64_t32_trio",
            "mixtral pair, T=4: 423 us bf16, 213 us fp8; w64_t16 431, 221",
            _NOT_KEPT,
            {"max_num_rows": 16, "max_touched_tiles": 800, "min_k": 3000},
        ),
        (
            "swap_fp8p_w128_t16",
            "1.02x the best kernel's time over 9 cells, worst 1.08x",
            _TUNING,
            {"max_num_rows": 12},
        ),
        (
            "swap_fp8p_w64_t32",
            "1.02x the best kernel's time over 6 cells, worst 1.09x",
            _TUNING,
            {"max_rows_per_group": 0.3, "max_touched_tiles": 800},
        ),
        (
            "swap_fp8p_w64_t16",
            "1.04x the best kernel's time over 2 cells, worst 1.07x",
            _TUNING,
            {"max_rows_per_group": 0.3, "max_touched_tiles": 1100},
        ),
        (
            "swap_fp8p_w64_t32",
            "1.00x the best kernel's time over 2 cells, worst 1.00x",
            _TUNING,
            {"max_rows_per_group": 1.1, "max_n": 384, "min_k": 1024},
        ),
        (
            "swap_fp8p_w128_t16",
            "1.01x the best kernel's time over 56 cells, worst 1.04x",
            _TUNING,
            {"max_rows_per_group": 6},
        ),
        (
            "swap_fp8p_w128_t64",
            "1.01x the best kernel's time over 24 cells, worst 1.03x",
            _TUNING,
            {"max_rows_per_group": 24},
        ),
        (
            "swap_fp8p_w256_t128",
            "1.02x the best kernel's time over 5 cells, worst 1.08x",
            _TUNING,
            {"max_rows_per_group": 100, "max_k": 600},
        ),
        (
            "swap_fp8p_w128_t128",
            "1.01x the best kernel's time over 23 cells, worst 1.04x",
            _TUNING,
            {"max_rows_per_group": 100},
        ),
        (
            "plain_fp8p_w256_t128",
            "1.01x the best kernel's time over 6 cells, worst 1.03x",
            _TUNING,
            {"max_k": 600},
        ),
        (
            "swap_fp8p_w128_t128",
            "1.00x the best kernel's time over 4 cells, worst 1.02x",
            _TUNING,
            {"max_n": 384},
        ),
        (
            "swap_fp8p_w192_t128",
            "1.03x the best kernel's time over 7 cells, worst 1.11x",
            _PREFILL,
            {"max_num_rows": 4096, "max_n": 4096},
        ),
        (
            "swap_fp8p_w256_t128",
            "1.03x the best kernel's time over 9 cells, worst 1.09x",
            _TUNING,
            {"max_rows_per_group": 200},
        ),
        (
            "swap_fp8p_w256_t128",
            "1.03x the best kernel's time over 8 cells, worst 1.11x",
            _TUNING,
            {"max_rows_per_group": 600, "max_num_rows": 16384},
        ),
        (
            "plain_fp8p_w256_t128",
            "1.04x the best kernel's time over 15 cells, worst 1.15x",
            _TUNING,
            {},
        ),
    ),
    *_rows(
        "fp8",
        "fast",
        (
            "swap_fp8f_w64_t32",
            "1.01x the best kernel's time over 25 cells, worst 1.06x",
            _TUNING,
            {"max_rows_per_group": 0.3, "max_touched_tiles": 800, "min_k": 512},
        ),
        (
            "swap_fp8f_w64_t32",
            "1.00x the best kernel's time over 2 cells, worst 1.00x",
            _TUNING,
            {"max_rows_per_group": 1.1, "max_n": 384, "min_k": 1024},
        ),
        (
            "swap_fp8f_w128_t64",
            "1.01x the best kernel's time over 91 cells, worst 1.06x",
            _TUNING,
            {"max_rows_per_group": 24},
        ),
        (
            "swap_fp8f_w128_t128_pair",
            "1.02x the best kernel's time over 28 cells, worst 1.11x",
            _TUNING,
            {"max_rows_per_group": 100, "max_n": 384},
        ),
        (
            "swap_fp8f_w256_t128",
            "1.01x the best kernel's time over 10 cells, worst 1.04x",
            _PREFILL,
            {"max_rows_per_group": 100, "min_k": 700},
        ),
        (
            "swap_fp8f_w128_t128_pair",
            "1.02x the best kernel's time over 28 cells, worst 1.11x",
            _TUNING,
            {"max_rows_per_group": 100},
        ),
        (
            "plain_fp8f_w256_t128",
            "1.00x the best kernel's time over 6 cells, worst 1.00x",
            _TUNING,
            {"max_k": 600},
        ),
        (
            "swap_fp8f_w128_t128_pair",
            "1.05x the best kernel's time over 4 cells, worst 1.11x",
            _TUNING,
            {"max_n": 384},
        ),
        (
            "swap_fp8f_w192_t128",
            "1.03x the best kernel's time over 7 cells, worst 1.08x",
            _PREFILL,
            {"max_num_rows": 4096, "max_n": 4096},
        ),
        (
            "swap_fp8f_w256_t128",
            "1.02x the best kernel's time over 14 cells, worst 1.11x",
            _TUNING,
            {"max_rows_per_group": 600, "max_num_rows": 16384},
        ),
        (
            "plain_fp8f_w256_t128",
            "1.00x the best kernel's time over 18 cells, worst 1.01x",
            _TUNING,
            {},
        ),
    ),
    *_rows(
        "fp8",
        "block",
        (
            "swap_fp8b_w64_t16_split2",
            "deepseek-v3-tp8 gate/up, T=1: 12.5 us; w64_t32 18.4",
            _BLOCK_STAGES,
            {"max_touched_tiles": 100, "min_k": 1024},
        ),
        (
            "swap_fp8b_w128_t16",
            "glm-4.5-air-tp8 down, T=1: 6.7 us; w64_t16 8.4",
            _BLOCK_STAGES,
            {"max_num_rows": 48, "max_rows_per_group": 1.2, "max_k": 300},
        ),
        (
            "swap_fp8b_w128_t16",
            "mixtral gate/up, T=1: 59.2 us; w64_t32_trio 61.5",
            _BLOCK_STAGES,
            {"max_num_rows": 2, "min_n": 7000},
        ),
        (
            "swap_fp8b_w64_t32",
            "mixtral down, T=1: 31.7 us; w64_t16 32.2, w128_t16 34.7 or more",
            _BLOCK_STAGES,
            {"max_num_rows": 2},
        ),
        (
            "swap_fp8b_w64_t32",
            "qwen3-30b, T=1: 9.9 and 7.0 us; w64_t32_trio 9.8 and 6.9",
            _BLOCK_STAGES,
            {"max_num_rows": 16, "max_touched_tiles": 300},
        ),
        (
            "swap_fp8b_w128_t16",
            "qwen3-next down, T=1: 8.7 us; w64_t16 9.1",
            _BLOCK_STAGES,
            {"max_num_rows": 12, "max_k": 600},
        ),
        (
            "swap_fp8b_w64_t32_trio",
            "mixtral down, T=4: 74.7 us; w128_t64 75.5, w64_t16 76.4",
            _BLOCK_STAGES,
            {"max_num_rows": 12, "min_k": 10000},
        ),
        (
            "swap_fp8b_w64_t32_trio",
            "mixtral gate/up, T=4: 138.2 us; w128_t64 142.4, w64_t16 146.3",
            _BLOCK_STAGES,
            {"max_num_rows": 12, "min_n": 16000},
        ),
        (
            "swap_fp8b_w128_t16",
            "deepseek-v3-ep8 gate/up, T=1: 57.8 us; w64_t32 59.4",
            _BLOCK_STAGES,
            {"max_num_rows": 12, "min_k": 7000},
        ),
        (
            "swap_fp8b_w128_t16",
            "gpt-oss-120b down, T=1: 12.0 us; w64_t32_trio 12.5",
            _BLOCK_STAGES,
            {"max_num_rows": 12, "max_n": 3000, "min_k": 2500, "max_k": 3000},
        ),
        (
            "swap_fp8b_w64_t16",
            "1.01x the best kernel's time over 9 stages, worst 1.03x",
            _BLOCK_STAGES,
            {"max_num_rows": 12},
        ),
        (
            "swap_fp8b_w64_t16",
            "qwen3-30b, T=4: 23.8 and 14.2 us; w128_t16 25.5 and 14.7",
            _BLOCK_STAGES,
            {"max_num_rows": 48, "max_rows_per_group": 1.2, "max_n": 2100},
        ),
        (
            "swap_fp8b_w64_t32_trio",
            "qwen3-235b, T=4: 84.3 and 43.1 us; w64_t16 85.5 and 43.9",
            _BLOCK_STAGES,
            {"max_num_rows": 48, "max_rows_per_group": 1.2},
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

# Compiled, chosen by no row and by the cost model for no usual shape; the tuner tries them all the
# same.
KEPT_FOR_TUNING: frozenset[str] = frozenset(
    {
        "swap_bf16_w64_t32",
        "swap_bf16_w128_t128",
        "swap_bf16_w128_t256",
        "swap_fp8p_w128_t128_pair",
        "swap_fp8p_w128_t256",
        "swap_fp8f_w128_t256",
        "swap_fp8b_w64_t16_deep",
    }
)
