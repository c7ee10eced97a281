"""Correctness before timing: sampled rows of sampled groups against fp32 on the same device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bench.draws import Counts
from bench.problem import Problem, StageInputs
from bench.scales import Scales, dequantise, make_scales

MAX_GROUPS = 8
ROWS_PER_GROUP = 16
MAX_ERROR = 0.01
# Without promotion the tensor core's 14 bits lose about 1 % at K = 14336, in every library's
# kernel: that error is reported, and only a wrong kernel is refused.
MAX_ERROR_FAST = 0.05


def max_error(problem: Problem, scale: str, outputs: Sequence[Tensor]) -> float:
    """Return the largest absolute difference over the largest absolute reference value.

    Args:
        problem: Inputs of the cell; `outputs` must come from call 0, so copy 0 and draw 0.
        scale: Layout of the scales, as in `make_scales`.
        outputs: (num_rows, n) per stage, or masked (num_experts, rows of a buffer, n).

    Returns:
        The worst stage's error; infinity when any element of an output's rows is not finite (an
        unwritten row, as the outputs start as NaN). Masked rows past a group's count may be.
    """
    plan = problem.plan
    return max(
        (
            _stage_error(stage, make_scales(stage, scale), out, plan.counts[0], plan.begins)
            for stage, out in zip(problem.stages, outputs, strict=True)
        ),
        default=math.inf,
    )


def _stage_error(
    stage: StageInputs, scales: Scales, out: Tensor, counts: Counts, begins: Counts
) -> float:
    by_row = out.flatten(0, -2)
    difference = torch.zeros((), device=out.device)
    largest = torch.zeros((), device=out.device)
    for group in sample_groups(counts):
        rows = torch.from_numpy(begins[group] + sample_rows(int(counts[group]))).to(out.device)
        a, b = dequantise(stage, scales, rows, group)
        reference = a @ b.t()
        difference = torch.maximum(difference, (by_row[rows].float() - reference).abs().max())
        largest = torch.maximum(largest, reference.abs().max())
    # One NaN or infinity anywhere makes the sum one; a sum needs no temporary of the output's size.
    parts = [out] if out.dim() == 2 else [out[g, : counts[g]] for g in np.flatnonzero(counts)]
    sums = torch.stack([part.sum(dtype=torch.float32) for part in parts])
    if not bool(sums.isfinite().all()):
        return math.inf
    return float(difference / largest)


def sample_groups(counts: Counts) -> list[int]:
    """Return the first, last, largest and smallest non-empty group and some in between."""
    active = np.flatnonzero(counts)
    by_size = active[np.argsort(counts[active], kind="stable")]
    between = active[np.linspace(0, len(active) - 1, MAX_GROUPS - 4).astype(int)]
    chosen = {int(g) for g in (active[0], active[-1], by_size[0], by_size[-1], *between)}
    return sorted(chosen)


def sample_rows(num_rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return rows within a group, first and last among them."""
    return np.unique(np.linspace(0, num_rows - 1, ROWS_PER_GROUP).astype(np.int64))
