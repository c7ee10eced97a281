"""DeepGEMM's masked grouped GEMM: the call, on buffers that `bench.problem` already laid out.

Written from the published interface of DeepGEMM 2.x, like `deep_gemm.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from bench.problem import Problem
from bench.scales import make_scales
from bench.timing import Call

BF16_NAME, FP8_NAME = "m_grouped_bf16_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked"


def prepare_masked(
    multiply: Callable[..., Any],
    problem: Problem,
    scale: str,
    weight_scales: Sequence[Tensor | None],
    to_columns: Callable[..., Any],
) -> Call:
    """Return the call; scales of activations are brought to columns before the timed region.

    Args:
        multiply: The function that `BF16_NAME` or `FP8_NAME` names.
        problem: A cell in the masked layout.
        scale: Layout of the scales: "none" or "block128".
        weight_scales: Per stage, as the function takes them.
        to_columns: The library's conversion of scales for TMA.
    """
    counts, copies, expected = problem.offs, problem.plan.copies, problem.plan.expected_rows
    row_scales = [make_scales(stage, scale).a for stage in problem.stages]
    columns = [None if own is None else to_columns(own) for own in row_scales]
    outputs = [stage.out for stage in problem.stages]

    def call(index: int) -> list[Tensor]:
        rows = counts[index % len(counts)]
        for stage, scale_a, scale_b in zip(problem.stages, columns, weight_scales, strict=True):
            b = stage.b[index % copies]
            if scale_a is None:
                multiply(stage.a, b, stage.out, rows, expected)
            else:
                multiply((stage.a, scale_a), (b, scale_b), stage.out, rows, expected)
        return outputs

    return call
