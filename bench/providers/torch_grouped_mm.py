"""PyTorch's grouped GEMMs: grouped_mm in BF16, scaled_grouped_mm in FP8 with row-wise scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.problem import Problem
from bench.providers.base import Provider, Variant
from bench.scales import make_scales
from bench.timing import Call


class TorchGroupedMM(Provider[Problem]):
    """FP8 always uses fast accumulation, the quickest of PyTorch's two."""

    name = "torch"
    needs = "torch.nn.functional.grouped_mm and scaled_grouped_mm (PyTorch 2.10)"

    def available(self) -> bool:
        """grouped_mm is public since PyTorch 2.10."""
        return hasattr(F, "grouped_mm") and hasattr(F, "scaled_grouped_mm")

    def variants(
        self,
        dtype: str,
        accumulates: Sequence[str],
        scales: Sequence[str],
        configs: Sequence[str],
    ) -> list[Variant]:
        """One variant per dtype, and none when a kernel of another provider is forced."""
        if configs:
            return []
        if dtype == "bf16":
            return [Variant("bf16", "none", "fp32")]
        return [Variant("fp8", "channel", "fast")]

    def prepare(self, problem: Problem, variant: Variant) -> Call:
        """Scales per row and per channel, the only ones of PyTorch's grouped FP8 GEMM here."""
        copies, offs = problem.plan.copies, problem.offs
        scales = [make_scales(stage, variant.scale) for stage in problem.stages]

        def call(index: int) -> list[Tensor]:
            ends = offs[index % len(offs)]
            outputs = []
            for stage, (scale_a, scale_b, _) in zip(problem.stages, scales, strict=True):
                b = stage.b[index % copies].transpose(-2, -1)
                if scale_a is None or scale_b is None:
                    outputs.append(F.grouped_mm(stage.a, b, offs=ends))
                    continue
                outputs.append(
                    F.scaled_grouped_mm(  # type: ignore[attr-defined]
                        stage.a,
                        b,
                        scale_a,
                        F.ScalingType.RowWise,
                        scale_b,
                        F.ScalingType.RowWise,
                        offs=ends,
                        output_dtype=torch.bfloat16,
                        use_fast_accum=variant.accumulate == "fast",
                    )
                )
            return outputs

        return call
