"""What the dispatcher's choice costs the host, for problems met before and for new ones."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from moe_ext._dispatch import select

from bench.cases import STAGES, case_names, get_case


class Question(NamedTuple):
    """What a GEMM of a layer asks the dispatcher."""

    dtype: str
    accumulate: str
    num_rows: int
    num_groups: int
    n: int
    k: int


class HostTime(NamedTuple):
    """Microseconds a choice: median and largest over batches, each a mean over its questions."""

    median_us: float
    max_us: float
    num_questions: int


KINDS = (("bf16", "fp32"), ("fp8", "promoted"), ("fp8", "fast"), ("fp8", "block"))
BATCHES, BATCH = 20, 100


def questions(num: int) -> list[Question]:
    """Return different questions: layers, stages and kinds of operands in turn, with token counts
    that no round repeats."""
    cases = [get_case(name) for name in case_names()]
    every = (
        Question(*kind, 37 * number * case.top_k, case.num_experts, *case.stage_shape(stage))
        for number in itertools.count(1)
        for case, stage, kind in itertools.product(cases, STAGES, KINDS)
    )
    return list(itertools.islice(every, num))


def _ask(batch: Sequence[Question]) -> float:
    """Return the microseconds of a choice, the mean over a batch."""
    start = time.perf_counter()
    for question in batch:
        select(*question)
    return 1e6 * (time.perf_counter() - start) / len(batch)


def time_choices(*, met_before: bool) -> HostTime:
    """Time choices for new problems, or for the same ones again."""
    every = questions(BATCHES * BATCH + len(KINDS))
    first, every = every[: len(KINDS)], every[len(KINDS) :]
    _ask(first)  # reads the list of kernels, for each kind of operands
    batches = [every[begin : begin + BATCH] for begin in range(0, len(every), BATCH)]
    if met_before:
        for batch in batches:
            _ask(batch)
    times = [_ask(batch) for batch in batches]
    return HostTime(statistics.median(times), max(times), len(every))
