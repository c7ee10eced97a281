"""Pools of weights for cells in any order of dtypes, and their plans, drawn a few at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from bench.draws import draw, draw_all, draw_key
from bench.problem import Cell, MemoryPool, Plan, make_plan
from bench.regret_cases import pool_bound
from bench.timing import TimingPolicy

CHUNK = 24  # cells whose routings are drawn together, before they are timed
DRY_RUN_TOKENS = 4


class Pools:
    """One pool of weights for each dtype, made when it is first asked for."""

    def __init__(self, cells: Iterable[Cell], policy: TimingPolicy, device: torch.device) -> None:
        """Look how large they have to be."""
        self._device = device
        self._bytes: dict[str, int] = {}
        self._pools: dict[str, MemoryPool] = {}
        for cell in cells:
            size = pool_bound(cell, policy)
            self._bytes[cell.dtype] = max(size, self._bytes.get(cell.dtype, 0))

    def of(self, plan: Plan) -> MemoryPool:
        """Return the pool of a plan."""
        dtype = plan.cell.dtype
        if dtype not in self._pools or plan.pool_bytes > self._bytes[dtype]:
            self._pools.pop(dtype, None)  # frees the old one first
            self._bytes[dtype] = max(plan.pool_bytes, self._bytes[dtype])
            self._pools[dtype] = MemoryPool(self._bytes[dtype], dtype, self._device)
        return self._pools[dtype]


def planned(cells: Sequence[Cell], policy: TimingPolicy) -> Iterator[Plan]:
    """Yield the plan of each cell."""
    for begin in range(0, len(cells), CHUNK):
        chunk = cells[begin : begin + CHUNK]
        keys = [draw_key(cell.case, cell.num_tokens, cell.routing) for cell in chunk]
        draws = draw_all(keys)
        for cell, key in zip(chunk, keys, strict=True):
            yield make_plan(cell, draws[key], policy)
        draw.cache_clear()


def shrunk(cell: Cell) -> Cell:
    """Return a miniature that a CPU runs, with blocks of scales on or off the grid as before."""
    small = replace(
        cell.case.shrunk(),
        name=cell.case.name,
        hidden_size=256,
        intermediate_size=256 if cell.case.intermediate_size % 128 == 0 else 176,
    )
    return replace(cell, case=small, num_tokens=min(cell.num_tokens, DRY_RUN_TOKENS))
