"""Types of the compiled `_planner`: kernels, their scheduler's twin and choice, a layer's sizes."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

class Plan(TypedDict):
    num_tiles: int
    waves: float
    padded_rows: int
    grid: int
    token_widths: list[int]
    token_tiles: list[int]

class MeasuredChoices:
    def __init__(
        self,
        choices: Sequence[tuple[int, int]],
        costs: Mapping[int, Sequence[float]],
        common: Sequence[float],
        problems: Sequence[tuple[Sequence[float], Sequence[float]]],
        sm_count: int,
        radius: float,
        shrink: float,
    ) -> None: ...
    def choose(
        self,
        rows: float,
        groups: float,
        hidden: float,
        intermediate: float,
        sm_count: int,
        allowed: int,
        /,
    ) -> tuple[int, float, int]: ...
    def choose_gemm(
        self, rows: float, groups: float, n: float, k: float, sm_count: int, allowed: int, /
    ) -> tuple[int, float, int, bool]: ...

def configs_csv() -> str: ...
def are_few(bf16_experts: int, num_experts: int) -> bool: ...
def spared_ctas(
    slots: int, num_experts: int, bf16_experts: int, config: int, sm_count: int
) -> int: ...
def gemm_terms(
    config: int, rows: float, groups: float, n: float, k: float, sm_count: int
) -> list[float]: ...
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
