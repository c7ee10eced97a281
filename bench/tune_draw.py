"""Problems that the tuner draws: ranks of models, sizes of no model and the named cases, by number.

From the same sources as the held-out ones of `bench.regret_cases`, with none of their sizes. Any
run that is cut off has a balanced part: kinds of operands go round, then the skews, every fourth
problem is of a named case, and the token counts of a kind fill the octaves evenly.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from bench.cases import ROUTINGS, STAGES, TOKENS, get_case, tuned_case_names
from bench.layer import TENSOR_STATIC
from bench.ops import LAYER, PAIR
from bench.problem import Cell
from bench.providers.base import Variant
from bench.regret_cases import MOST_TOKENS, NUM_CASES, draw_case, fits, held_out, sizes_of

SEED = 20261130
# How often a table is asked for, more or less: sums that several scale layouts share come with
# each of them, the first GEMM of layers has no sums of its own that stay in the tensor core.
KINDS: tuple[tuple[str, Variant], ...] = (
    (PAIR, Variant("bf16", "none", "fp32")),
    (PAIR, Variant("fp8", "tensor", "promoted")),
    (LAYER, Variant("fp8", "channel", "promoted")),
    (PAIR, Variant("fp8", "block128", "promoted")),
    (LAYER, Variant("bf16", "none", "fp32")),
    (PAIR, Variant("fp8", "channel", "promoted")),
    (PAIR, Variant("fp8", "tensor", "fast")),
    (LAYER, Variant("fp8", "block128", "promoted")),
    (PAIR, Variant("fp8", "block128_x_tensor", "promoted")),
    (PAIR, Variant("bf16", "none", "fp32")),
    (LAYER, Variant("fp8", TENSOR_STATIC, "promoted")),
    (PAIR, Variant("fp8", "channel_x_tensor", "promoted")),
    (LAYER, Variant("fp8", "tensor", "fast")),
)
NAMED_EVERY = 4
# Multiples of it, without their whole parts, leave no gap much larger than others.
_GOLDEN = (math.sqrt(5) - 1) / 2


@cache
def held_out_sizes() -> frozenset[tuple[int, int, int]]:
    """Return the sizes that the tuner must not see."""
    return frozenset(sizes_of(held_out(number).cell.case) for number in range(NUM_CASES))


def drawn(number: int, seed: int = SEED) -> tuple[Cell, Variant]:
    """Return problem `number`, which depends on the seed and it alone."""
    op, variant = KINDS[number % len(KINDS)]
    turn = number // len(KINDS)
    routing = ROUTINGS[turn % len(ROUTINGS)]
    generator = np.random.Generator(np.random.PCG64([seed, number]))
    begin = np.random.Generator(np.random.PCG64([seed, number % len(KINDS)])).random()
    tokens = int(2 ** ((begin + turn * _GOLDEN) % 1 * math.log2(MOST_TOKENS)))
    named = tuned_case_names()
    while True:
        if number % NAMED_EVERY == 0:
            case = get_case(named[generator.integers(len(named))])
            tokens = min(TOKENS, key=lambda other: abs(math.log2(other / tokens)))
        else:
            case = draw_case(generator)
        cell = Cell(case, STAGES, tokens, variant.dtype, routing, op=op)
        if sizes_of(case) not in held_out_sizes() and fits(cell, variant):
            return cell, variant
        # Few sizes have room for that many tokens: not the same count for ever.
        tokens = max(1, int(tokens * 2 ** generator.uniform(-0.5, 0.25)))
