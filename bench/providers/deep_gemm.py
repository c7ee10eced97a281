"""DeepGEMM's grouped GEMMs, BF16 and FP8 with scales per block. The masked call is in
`deep_gemm_masked.py`.

The contiguous one wants every group to begin at a multiple of its alignment, an expert per row
(-1 for padding) and the activations' scales in columns that TMA can load. All of that is brought
about before the timed region: in a model the kernels before the GEMM write that layout. Written
from the published interface of DeepGEMM 2.x; compiled at run time by DeepGEMM itself, so it needs
nvcc.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.draws import Counts
from bench.layouts import LAYOUTS, MASKED
from bench.problem import Problem, StageInputs
from bench.providers.base import Provider, Variant
from bench.providers.deep_gemm_masked import BF16_NAME, FP8_NAME, prepare_masked
from bench.scales import BLOCK, make_scales
from bench.timing import Call

# Names of 2.x, newest first.
ALIGNMENT_NAMES = (
    "get_mk_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
)
COLUMNS_NAMES = ("get_mn_major_tma_aligned_tensor", "get_col_major_tma_aligned_tensor")


@dataclass(frozen=True)
class Layout:
    """Rows of one draw with every group padded; groups without rows take none."""

    source: Tensor  # (padded_rows,) int64: row of the unpadded activations, 0 in padding
    experts: Tensor  # (padded_rows,) int32: expert of the row, -1 in padding
    rows: Tensor  # (num_rows,) int64: place of each unpadded row


@dataclass(frozen=True)
class Operands:
    """Padded activations of one draw and GEMM, and their output."""

    a: Tensor  # (padded_rows, k), zero in padding
    scale_a: Tensor | None
    experts: Tensor
    out: Tensor  # (padded_rows, n)


class DeepGemm(Provider[Problem]):
    """`m_grouped_bf16_gemm_nt_contiguous` and `m_grouped_fp8_gemm_nt_contiguous`, or `_masked`."""

    name = "deep_gemm"
    needs = "the package deep_gemm"
    layouts = LAYOUTS

    def available(self) -> bool:
        """Return whether the package is installed; it is imported when a cell is prepared."""
        return importlib.util.find_spec("deep_gemm") is not None

    def variants(
        self,
        dtype: str,
        accumulates: Sequence[str],
        scales: Sequence[str],
        configs: Sequence[str],
    ) -> list[Variant]:
        """BF16, and FP8 where scales per block are asked for: it has no others on Hopper."""
        if configs:
            return []
        if dtype == "bf16":
            return [Variant("bf16", "none", "fp32")]
        return [Variant("fp8", "block128", "promoted")] if "block128" in scales else []

    def prepare(self, problem: Problem, variant: Variant) -> Call:
        """Lay out the activations of every draw of the graph."""
        library = _import()
        to_columns = _find(library, COLUMNS_NAMES)
        weight_scales = [_weight_scales(stage, variant.scale) for stage in problem.stages]
        if problem.plan.cell.layout == MASKED:
            multiply = _find(library, (BF16_NAME if variant.dtype == "bf16" else FP8_NAME,))
            return prepare_masked(multiply, problem, variant.scale, weight_scales, to_columns)
        alignment = int(_find(library, ALIGNMENT_NAMES)())
        layouts = _layouts(problem, alignment)
        copies = problem.plan.copies
        operands = [
            [_operands(stage, variant.scale, layout, to_columns) for stage in problem.stages]
            for layout in layouts
        ]

        def call(index: int) -> list[Tensor]:
            draw = operands[index % len(operands)]
            for stage, own, scale_b in zip(problem.stages, draw, weight_scales, strict=True):
                b = stage.b[index % copies]
                if own.scale_a is None:
                    library.m_grouped_bf16_gemm_nt_contiguous(own.a, b, own.out, own.experts)
                else:
                    library.m_grouped_fp8_gemm_nt_contiguous(
                        (own.a, own.scale_a), (b, scale_b), own.out, own.experts
                    )
            return [own.out for own in draw]

        return call

    def unpack(self, problem: Problem, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Take the padding out again; masked outputs have none."""
        if problem.plan.cell.layout == MASKED:
            return list(outputs)
        alignment = int(_find(_import(), ALIGNMENT_NAMES)())
        rows = _layout(problem.plan.counts[0], alignment, outputs[0].device).rows
        return [out[rows] for out in outputs]

    def config_name(self, problem: Problem, variant: Variant) -> str:
        """It does not say which kernel runs."""
        return problem.plan.cell.layout


def _import() -> Any:
    try:
        return importlib.import_module("deep_gemm")
    except (ImportError, OSError) as failure:
        # A RuntimeError becomes the reason why the cell is skipped.
        raise RuntimeError(f"deep_gemm cannot be imported: {failure}") from failure


def _find(library: Any, names: Sequence[str]) -> Callable[..., Any]:
    for name in names:
        function: Callable[..., Any] | None = getattr(library, name, None)
        if function is not None:
            return function
    raise RuntimeError(f"deep_gemm must have one of {', '.join(names)}, got none")


def _layouts(problem: Problem, alignment: int) -> list[Layout]:
    """Return the layouts of the draws that the calls of a graph use."""
    used = problem.plan.counts[: problem.plan.calls]
    device = problem.stages[0].a.device
    return [_layout(counts, alignment, device) for counts in used]


def _layout(counts: Counts, alignment: int, device: torch.device) -> Layout:
    padded = -(-counts // alignment) * alignment
    experts = np.repeat(np.arange(len(counts)), counts)
    shifts = np.cumsum(padded) - padded - (np.cumsum(counts) - counts)
    rows = np.arange(len(experts)) + shifts[experts]
    source = np.zeros(int(padded.sum()), dtype=np.int64)
    expert_of_row = np.full(len(source), -1, dtype=np.int32)
    source[rows], expert_of_row[rows] = np.arange(len(rows)), experts
    return Layout(
        *(torch.from_numpy(values).to(device) for values in (source, expert_of_row, rows))
    )


def _operands(
    stage: StageInputs, scale: str, layout: Layout, to_columns: Callable[..., Any]
) -> Operands:
    in_padding = layout.experts < 0
    # As bytes: indexing by a tensor is not there for every 8-bit float on every device.
    integers = torch.uint8 if stage.a.element_size() == 1 else torch.int16
    a = stage.a.view(integers)[layout.source].masked_fill_(in_padding[:, None], 0)
    n = stage.b[0].shape[1]
    # NaN, so that an unwritten row shows in the check.
    out = torch.full((len(a), n), math.nan, dtype=torch.bfloat16, device=a.device)
    scale_a = make_scales(stage, scale).a
    if scale_a is not None:
        # Zero in padding, like the values: a product of nothing must stay finite.
        scale_a = scale_a[layout.source].masked_fill_(in_padding[:, None], 0.0)
        scale_a = to_columns(scale_a)
    return Operands(a.view(stage.a.dtype), scale_a, layout.experts, out)


def _weight_scales(stage: StageInputs, scale: str) -> Tensor | None:
    """Return (num_experts, ceil(n / 128), ceil(k / 128)), the only grid that DeepGEMM has."""
    scales = make_scales(stage, scale)
    if scales.n_segments != 1:
        raise ValueError(
            f"deep_gemm: blocks of gate and up must begin at multiples of {BLOCK}, got up at "
            f"{stage.b[0].shape[1] // 2}"
        )
    return None if scales.b is None else scales.b.flatten(1, 2).contiguous()
