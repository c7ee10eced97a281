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
_NOT_KEPT = "its rows were not kept"


def _row(
    dtype: str,
    accumulate: str,
    config: str,
    result: str,
    *,
    source: str = _TUNING,
    **limits: float,
) -> Row:
    """A row and where its measurement is, by default the tuning run of single GEMMs."""
    where = f"H200, zipf0.6, {source}"
    return Row(dtype, accumulate, config, f"{result}; {where}", **limits)  # type: ignore[arg-type]


TABLE: tuple[Row, ...] = (
    _row(
        "bf16",
        "fp32",
        "swap_bf16_w64_t16_split2",
        "1.00x the best kernel's time over 3 cells, worst 1.00x",
        max_num_rows=16,
        max_touched_tiles=80,
        min_k=1024,
    ),
    _row(
        "bf16",
        "fp32",
        "swap_bf16_w64_t16_deep",
        "1.02x the best kernel's time over 2 cells, worst 1.04x",
        max_num_rows=16,
        max_touched_tiles=132,
        min_k=2048,
    ),
    _row(
        "bf16",
        "fp32",
        "swap_bf16_w128_t16",
        "1.03x the best kernel's time over 11 cells, worst 1.08x",
        max_num_rows=12,
        max_touched_tiles=400,
    ),
    _row(
        "bf16",
        "fp32",
        "swap_bf16_w64_t32_trio",
        "mixtral pair, T=4: 423 us bf16, 213 us fp8; w64_t16 431, 221",
        source=_NOT_KEPT,
        max_num_rows=16,
        max_touched_tiles=800,
        min_k=3000,
    ),
    _row(
        "bf16",
        "fp32",
        "swap_bf16_w128_t16",
        "1.01x the best kernel's time over 9 cells, worst 1.06x",
        max_num_rows=12,
    ),
    _row(
        "bf16",
        "fp32",
        "swap_bf16_w64_t16",
        "1.03x the best kernel's time over 8 cells, worst 1.07x",
        max_rows_per_group=0.3,
        max_touched_tiles=1100,
    ),
    _row(
        "bf16",
        "fp32",
        "swap_bf16_w128_t16",
        "1.00x the best kernel's time over 58 cells, worst 1.03x",
        max_rows_per_group=6,
    ),
    _row(
        "bf16",
        "fp32",
        "swap_bf16_w128_t64",
        "1.00x the best kernel's time over 24 cells, worst 1.02x",
        max_rows_per_group=24,
    ),
    _row(
        "bf16",
        "fp32",
        "swap_bf16_w128_t128_pair",
        "1.01x the best kernel's time over 28 cells, worst 1.04x",
        max_rows_per_group=100,
        max_n=384,
    ),
    _row(
        "bf16",
        "fp32",
        "swap_bf16_w256_t128",
        "1.01x the best kernel's time over 10 cells, worst 1.04x",
        source=_PREFILL,
        max_rows_per_group=100,
        min_k=700,
    ),
    _row(
        "bf16",
        "fp32",
        "swap_bf16_w128_t128_pair",
        "1.01x the best kernel's time over 28 cells, worst 1.04x",
        max_rows_per_group=100,
    ),
    _row(
        "bf16",
        "fp32",
        "plain_bf16_w256_t128",
        "1.00x the best kernel's time over 5 cells, worst 1.00x",
        max_k=300,
    ),
    _row(
        "bf16",
        "fp32",
        "swap_bf16_w128_t128_pair",
        "1.05x the best kernel's time over 4 cells, worst 1.13x",
        max_n=384,
    ),
    _row(
        "bf16",
        "fp32",
        "swap_bf16_w192_t128",
        "1.00x the best kernel's time over 7 cells, worst 1.01x",
        source=_PREFILL,
        max_num_rows=4096,
        max_n=4096,
    ),
    _row(
        "bf16",
        "fp32",
        "swap_bf16_w256_t128",
        "1.01x the best kernel's time over 10 cells, worst 1.08x",
        max_rows_per_group=200,
    ),
    _row(
        "bf16",
        "fp32",
        "swap_bf16_w256_t128",
        "1.01x the best kernel's time over 8 cells, worst 1.08x",
        max_rows_per_group=600,
        max_num_rows=16384,
    ),
    _row(
        "bf16",
        "fp32",
        "plain_bf16_w256_t128",
        "1.03x the best kernel's time over 15 cells, worst 1.17x",
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w64_t16_split2",
        "1.00x the best kernel's time over 3 cells, worst 1.00x",
        max_num_rows=16,
        max_touched_tiles=80,
        min_k=1024,
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w64_t16_deep",
        "1.04x the best kernel's time over 2 cells, worst 1.04x",
        max_num_rows=16,
        max_touched_tiles=132,
        min_k=2048,
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w64_t16",
        "1.02x the best kernel's time over 11 cells, worst 1.13x",
        max_num_rows=12,
        max_touched_tiles=400,
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w64_t32_trio",
        "mixtral pair, T=4: 423 us bf16, 213 us fp8; w64_t16 431, 221",
        source=_NOT_KEPT,
        max_num_rows=16,
        max_touched_tiles=800,
        min_k=3000,
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w128_t16",
        "1.02x the best kernel's time over 9 cells, worst 1.08x",
        max_num_rows=12,
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w64_t32",
        "1.02x the best kernel's time over 6 cells, worst 1.09x",
        max_rows_per_group=0.3,
        max_touched_tiles=800,
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w64_t16",
        "1.04x the best kernel's time over 2 cells, worst 1.07x",
        max_rows_per_group=0.3,
        max_touched_tiles=1100,
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w64_t32",
        "1.00x the best kernel's time over 2 cells, worst 1.00x",
        max_rows_per_group=1.1,
        max_n=384,
        min_k=1024,
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w128_t16",
        "1.01x the best kernel's time over 56 cells, worst 1.04x",
        max_rows_per_group=6,
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w128_t64",
        "1.01x the best kernel's time over 24 cells, worst 1.03x",
        max_rows_per_group=24,
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w256_t128",
        "1.02x the best kernel's time over 5 cells, worst 1.08x",
        max_rows_per_group=100,
        max_k=600,
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w128_t128",
        "1.01x the best kernel's time over 23 cells, worst 1.04x",
        max_rows_per_group=100,
    ),
    _row(
        "fp8",
        "promoted",
        "plain_fp8p_w256_t128",
        "1.01x the best kernel's time over 6 cells, worst 1.03x",
        max_k=600,
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w128_t128",
        "1.00x the best kernel's time over 4 cells, worst 1.02x",
        max_n=384,
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w192_t128",
        "1.03x the best kernel's time over 7 cells, worst 1.11x",
        source=_PREFILL,
        max_num_rows=4096,
        max_n=4096,
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w256_t128",
        "1.03x the best kernel's time over 9 cells, worst 1.09x",
        max_rows_per_group=200,
    ),
    _row(
        "fp8",
        "promoted",
        "swap_fp8p_w256_t128",
        "1.03x the best kernel's time over 8 cells, worst 1.11x",
        max_rows_per_group=600,
        max_num_rows=16384,
    ),
    _row(
        "fp8",
        "promoted",
        "plain_fp8p_w256_t128",
        "1.04x the best kernel's time over 15 cells, worst 1.15x",
    ),
    _row(
        "fp8",
        "fast",
        "swap_fp8f_w64_t32",
        "1.01x the best kernel's time over 25 cells, worst 1.06x",
        max_rows_per_group=0.3,
        max_touched_tiles=800,
        min_k=512,
    ),
    _row(
        "fp8",
        "fast",
        "swap_fp8f_w64_t32",
        "1.00x the best kernel's time over 2 cells, worst 1.00x",
        max_rows_per_group=1.1,
        max_n=384,
        min_k=1024,
    ),
    _row(
        "fp8",
        "fast",
        "swap_fp8f_w128_t64",
        "1.01x the best kernel's time over 91 cells, worst 1.06x",
        max_rows_per_group=24,
    ),
    _row(
        "fp8",
        "fast",
        "swap_fp8f_w128_t128_pair",
        "1.02x the best kernel's time over 28 cells, worst 1.11x",
        max_rows_per_group=100,
        max_n=384,
    ),
    _row(
        "fp8",
        "fast",
        "swap_fp8f_w256_t128",
        "1.01x the best kernel's time over 10 cells, worst 1.04x",
        source=_PREFILL,
        max_rows_per_group=100,
        min_k=700,
    ),
    _row(
        "fp8",
        "fast",
        "swap_fp8f_w128_t128_pair",
        "1.02x the best kernel's time over 28 cells, worst 1.11x",
        max_rows_per_group=100,
    ),
    _row(
        "fp8",
        "fast",
        "plain_fp8f_w256_t128",
        "1.00x the best kernel's time over 6 cells, worst 1.00x",
        max_k=600,
    ),
    _row(
        "fp8",
        "fast",
        "swap_fp8f_w128_t128_pair",
        "1.05x the best kernel's time over 4 cells, worst 1.11x",
        max_n=384,
    ),
    _row(
        "fp8",
        "fast",
        "swap_fp8f_w192_t128",
        "1.03x the best kernel's time over 7 cells, worst 1.08x",
        source=_PREFILL,
        max_num_rows=4096,
        max_n=4096,
    ),
    _row(
        "fp8",
        "fast",
        "swap_fp8f_w256_t128",
        "1.02x the best kernel's time over 14 cells, worst 1.11x",
        max_rows_per_group=600,
        max_num_rows=16384,
    ),
    _row(
        "fp8",
        "fast",
        "plain_fp8f_w256_t128",
        "1.00x the best kernel's time over 18 cells, worst 1.01x",
    ),
)

# Compiled, chosen by no row and by the cost model for no usual shape; the tuner tries them all the
# same.
KEPT_FOR_TUNING: frozenset[str] = frozenset(
    {
        "swap_bf16_w64_t32",
        "swap_bf16_w128_t128",
        "swap_bf16_w128_t256",
        "swap_bf16_w128_t256_mc2",
        "swap_fp8p_w128_t128_pair",
        "swap_fp8p_w128_t256",
        "swap_fp8f_w128_t256",
        "swap_fp8f_w128_t256_mc2",
        "swap_fp8b_w64_t16_deep",
        "swap_fp8b_w64_t32_trio",
        "swap_fp8b_w64_t32",
        "swap_fp8b_w128_t128",
    }
)
