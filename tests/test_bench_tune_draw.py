"""The problems that the tuner draws: apart from the held-out ones, balanced wherever a run ends."""

from __future__ import annotations

import math
from collections import Counter

from bench.cases import ROUTINGS, get_case, tuned_case_names
from bench.ops import LAYER, PAIR
from bench.regret_cases import NUM_CASES, held_out, sizes_of
from bench.tune_draw import KINDS, NAMED_EVERY, SEED, drawn

EVERY = [drawn(number) for number in range(78)]


def test_they_depend_on_seed_and_number() -> None:
    assert drawn(11) == EVERY[11] != drawn(11, SEED + 1)


def test_none_has_the_sizes_of_a_held_out_case() -> None:
    held = {sizes_of(held_out(number).cell.case) for number in range(NUM_CASES)}
    for number in range(1000):
        assert sizes_of(drawn(number)[0].case) not in held


def test_names_hold_the_sizes() -> None:
    for cell, _ in EVERY:
        assert sizes_of(get_case(cell.case.name)) == sizes_of(cell.case)
        assert get_case(cell.case.name).top_k == cell.case.top_k


def test_any_beginning_is_balanced() -> None:
    met = Counter((cell.op, variant, cell.routing) for cell, variant in EVERY)
    assert len(met) == (len(KINDS) - 1) * len(ROUTINGS)  # BF16 pairs are there twice
    assert {cell.op for cell, _ in EVERY} == {PAIR, LAYER}
    named = [cell.case.name in tuned_case_names() for cell, _ in EVERY]
    assert named == [number % NAMED_EVERY == 0 for number in range(len(EVERY))]
    octaves = Counter(int(math.log2(cell.num_tokens)) // 3 for cell, _ in EVERY)
    assert min(octaves[part] for part in range(4)) > len(EVERY) / 8
