"""Routing draws of a run, made by a thread pool before anything is timed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bench.cases import Case
from bench.data.routing import make_routing


@dataclass(frozen=True)
class DrawKey:
    """What a set of draws depends on; cases with the same experts share one."""

    num_tokens: int
    num_experts: int
    top_k: int
    routing: str

    @property
    def num_draws(self) -> int:
        """Fewer draws for many tokens, where one draw looks like the next."""
        if self.num_tokens <= 256:
            return 16
        return 8 if self.num_tokens <= 1024 else 4


def draw_key(case: Case, num_tokens: int, routing: str) -> DrawKey:
    """Return the key of the draws that a case uses."""
    return DrawKey(num_tokens, case.num_experts, case.top_k, routing)


Counts = npt.NDArray[np.int64]


@cache
def draw(key: DrawKey, seed: int) -> tuple[Tensor, Tensor]:
    """Return ids (num_tokens, top_k) int32 and weights (num_tokens, top_k) float32 of one draw.

    All draws are kept: those of a full grid take tens of megabytes and seconds.
    """
    return make_routing(key.num_tokens, key.num_experts, key.top_k, key.routing, seed)


def draw_counts(key: DrawKey, seed: int) -> Counts:
    """Return the rows of every expert in one draw: (num_experts,)."""
    ids, _ = draw(key, seed)
    return np.bincount(ids.numpy().reshape(-1), minlength=key.num_experts)


def draw_all(keys: Iterable[DrawKey]) -> dict[DrawKey, Counts]:
    """Return (num_draws, num_experts) counts per key; NumPy releases the GIL, so threads do."""
    unique = sorted(set(keys), key=lambda key: -key.num_tokens * key.num_experts)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        futures = {
            key: [pool.submit(draw_counts, key, seed) for seed in range(key.num_draws)]
            for key in unique
        }
        return {key: np.stack([f.result() for f in parts]) for key, parts in futures.items()}
