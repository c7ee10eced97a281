"""Types of the compiled `_planner`: kernels, the twin of their scheduler, a layer's sizes."""

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
def workspace_layout(
    num_slots: int, hidden_size: int, intermediate_size: int, num_experts: int, fp8: bool
) -> dict[str, int]: ...
def workspace_bytes(
    num_slots: int, hidden_size: int, intermediate_size: int, num_experts: int
) -> int: ...
def weight_scale_of(
    shape: Sequence[int], num_experts: int, n: int, k: int
) -> tuple[str, int] | None: ...
