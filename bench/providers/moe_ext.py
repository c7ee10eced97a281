"""This project: grouped_gemm_out and grouped_gemm_masked_out of torch.ops.moe_ext, BF16 and FP8."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from bench.layouts import LAYOUTS, MASKED
from bench.problem import Problem
from bench.providers.base import Provider, Variant, accumulations, kernels_of
from bench.scales import SCALES, count_segments, has_blocks, make_scales
from bench.timing import Call


class MoeExt(Provider[Problem]):
    """The dispatcher's choice, or named kernels for tuning."""

    name = "moe_ext"
    needs = "the package moe_ext"
    layouts = LAYOUTS

    def available(self) -> bool:
        """Return whether the package is importable."""
        return importlib.util.find_spec("moe_ext") is not None

    def variants(
        self,
        dtype: str,
        accumulates: Sequence[str],
        scales: Sequence[str],
        configs: Sequence[str],
    ) -> list[Variant]:
        """BF16 always accumulates in fp32; FP8 once per layout and accumulation that it has."""
        fitting = [scale for scale in scales if scale in SCALES]
        kinds = accumulations(dtype, accumulates, fitting)
        if not configs:
            return [Variant(dtype, *kind) for kind in kinds]

        from moe_ext._configs import matching_configs

        return [
            Variant(dtype, scale, accumulate, config.id)
            for scale, accumulate in kinds
            for config in matching_configs(dtype, sums_of(scale, accumulate))
            if "all" in configs or config.id in configs
        ]

    def prepare(self, problem: Problem, variant: Variant) -> Call:
        """Write into the problem's outputs, so that nothing is allocated in the timed region.

        Only the second GEMM of a pair says `offs_ready=True`: calls of a replay must not overlap,
        so the first kernel of a call is launched without programmatic dependence.
        """
        import moe_ext  # noqa: F401  registers the op

        multiply = torch.ops.moe_ext.grouped_gemm_out
        options: dict[str, int] = {}
        if problem.plan.cell.layout == MASKED:
            multiply = torch.ops.moe_ext.grouped_gemm_masked_out
            options["expected_rows"] = problem.plan.expected_rows
        copies, offs = problem.plan.copies, problem.offs
        accumulate = "fast" if variant.accumulate == "fast" else "promoted"
        outputs = [stage.out for stage in problem.stages]
        layouts = [make_scales(stage, variant.scale) for stage in problem.stages]
        kernels: list[str] | list[None] = [None] * len(outputs)
        if variant.config is not None:
            kernels = kernels_of(variant.config, len(outputs))

        def call(index: int) -> list[Tensor]:
            ends = offs[index % len(offs)]
            for position, stage in enumerate(problem.stages):
                multiply(
                    stage.a,
                    stage.b[index % copies],
                    ends,
                    scale_a=layouts[position].a,
                    scale_b=layouts[position].b,
                    n_segments=layouts[position].n_segments,
                    accumulate=accumulate,
                    offs_ready=position > 0,
                    config=kernels[position],
                    out=stage.out,
                    **options,
                )
            return outputs

        return call

    def config_name(self, problem: Problem, variant: Variant) -> str:
        """Ask the dispatcher, as the op does."""
        if variant.config is not None:
            return variant.config
        if not problem.stages[0].a.is_cuda:
            return "reference"
        device = problem.stages[0].a.device
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        num_rows = problem.plan.cell.num_rows
        if problem.plan.cell.layout == MASKED:
            num_rows = problem.plan.expected_rows * problem.plan.cell.case.num_experts
        return "+".join(
            dispatched(variant, stage.name, num_rows, stage.b[0].shape, sm_count)
            for stage in problem.stages
        )


def sums_of(scale: str, accumulate: str, stage: str = "", n: int = 0) -> str:
    """Return dispatch's name of the way to sum."""
    from moe_ext._scales import block_kind

    if not has_blocks(scale):
        return accumulate
    return block_kind(n, count_segments(stage, n, scale), 0)


def dispatched(
    variant: Variant,
    stage: str,
    num_rows: int,
    weights_shape: Sequence[int],
    sm_count: int = 132,
) -> str:
    """Return the kernel that the dispatcher takes for one GEMM; `weights_shape` is that of `b`."""
    from moe_ext import _dispatch
    from moe_ext._configs import all_configs

    num_groups, n, k = weights_shape
    index = _dispatch.select(
        dtype=variant.dtype,
        accumulate=sums_of(variant.scale, variant.accumulate, stage, n),
        num_rows=num_rows,
        num_groups=num_groups,
        n=n,
        k=k,
        sm_count=sm_count,
    )
    return all_configs()[index].id
