"""Types of the compiled `_planner`: the list of kernels, the host twin of their scheduler."""

from collections.abc import Sequence
from typing import TypedDict

class Plan(TypedDict):
    num_tiles: int
    waves: float
    padded_rows: int
    grid: int
    token_widths: list[int]
    token_tiles: list[int]

def configs_csv() -> str: ...
def plan(offs: Sequence[int], num_rows: int, n: int, config: int, sm_count: int) -> Plan: ...
def tiles(
    offs: Sequence[int], num_rows: int, n: int, config: int
) -> list[tuple[int, int, int, int, int]]: ...
