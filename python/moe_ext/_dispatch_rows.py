"""A row of the table of measured choices: limits on a problem's sizes, and a kernel."""

from __future__ import annotations

import math
from typing import NamedTuple

from moe_ext._math import ceil_div

# Pairs of GEMMs, T <= 256.
DECODE_PAIRS = "bench/results/probes/pairs-l2-128-2026-11-30.jsonl"


class Row(NamedTuple):
    """A choice for the problems within all of its limits; a limit not given does not limit.

    `rows_per_group` is num_rows / num_groups, an average: the host knows no more than that.
    `touched_tiles` counts the 64-row weight tiles that the rows can touch at most: how many CTAs
    can be busy when each row has a group of its own. `weight_tiles` counts those of all groups:
    the layers that were measured have 512 and more. With far fewer, as one expert a GPU has, a
    wide tile would leave most SMs idle, and no row is for that. `max_k_alignment` bounds the
    largest power of two that divides k.
    """

    dtype: str
    accumulate: str
    config: str
    measurement: str
    min_rows_per_group: float = 0.0
    max_rows_per_group: float = math.inf
    min_num_rows: int = 0
    max_num_rows: float = math.inf
    max_touched_tiles: float = math.inf
    min_weight_tiles: int = 400
    min_n: int = 0
    max_n: float = math.inf
    min_k: int = 0
    max_k: float = math.inf
    max_k_alignment: float = math.inf
    sm_count: int = 132

    def matches(self, num_rows: int, num_groups: int, n: int, k: int, sm_count: int) -> bool:
        """Whether a problem lies within the row's limits."""
        tiles = ceil_div(n, 64)
        return (
            self.min_rows_per_group * num_groups <= num_rows
            and num_rows <= self.max_rows_per_group * num_groups
            and self.min_num_rows <= num_rows <= self.max_num_rows
            and min(num_rows, num_groups) * tiles <= self.max_touched_tiles
            and num_groups * tiles >= self.min_weight_tiles
            and self.min_n <= n <= self.max_n
            and self.min_k <= k <= self.max_k
            and (k & -k) <= self.max_k_alignment
            and sm_count == self.sm_count
        )


Choice = tuple[str, str, str, dict[str, float]]
"""Kernel, what was measured, the file that holds it, and limits of `Row`."""


def rows_of(dtype: str, accumulate: str, *choices: Choice) -> list[Row]:
    """Make the rows of one kind of operands; each says where its measurement is."""
    return [
        Row(dtype, accumulate, config, f"{result}; H200, zipf0.6, {where}", **limits)  # type: ignore[arg-type]
        for config, result, where, limits in choices
    ]
