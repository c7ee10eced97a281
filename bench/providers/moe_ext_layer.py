"""This project's whole layer: fused_moe_out, into a given output and with a given workspace."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.layer import LAYER_SCALES, LayerProblem, make_layer_scales
from bench.providers.base import Provider, Variant, accumulations, kernels_of
from bench.timing import Call


class MoeExtLayer(Provider[LayerProblem]):
    """`moe_ext.fused_moe_out` with SwiGLU, from hidden states and ids to the output."""

    name = "moe_ext"
    needs = "the package moe_ext"
    batch_invariant = True

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
        """As the GEMMs alone, in the scale layouts of a layer; `bench.candidates` names kernels."""
        if configs:
            return []
        fitting = [scale for scale in scales if scale in LAYER_SCALES]
        return [Variant(dtype, *kind) for kind in accumulations(dtype, accumulates, fitting)]

    def prepare(self, problem: LayerProblem, variant: Variant) -> Call:
        """Allocate the workspace, so that nothing is allocated in the timed region."""
        from moe_ext import fused_moe_out, fused_moe_workspace_size

        cell = problem.plan.cell
        size = fused_moe_workspace_size(
            num_tokens=cell.num_tokens,
            top_k=cell.case.top_k,
            hidden_size=cell.case.hidden_size,
            intermediate_size=cell.case.intermediate_size,
            num_experts=cell.case.num_experts,
        )
        workspace = torch.empty(size, dtype=torch.uint8, device=problem.out.device)
        options = {
            "workspace": workspace,
            "accumulate": _accumulate(variant),
            "batch_invariant": variant.batch_invariant,
            **make_layer_scales(problem, variant.scale)._asdict(),
        }
        if variant.config is not None and problem.out.is_cuda:
            return _forced(problem, kernels_of(variant.config, 2), options)

        def call(index: int) -> list[Tensor]:
            fused_moe_out(*problem.operands(index), out=problem.out, **options)
            return [problem.out]

        return call

    def config_name(self, problem: LayerProblem, variant: Variant) -> str:
        """Ask for the kernels as the op does."""
        if variant.config is not None:
            return variant.config
        if not problem.out.is_cuda:
            return "reference"
        properties = torch.cuda.get_device_properties(problem.out.device)
        return chosen(problem, variant, properties.multi_processor_count)


def _forced(problem: LayerProblem, names: Sequence[str], options: dict[str, Any]) -> Call:
    """Return a call with kernels that the op, which takes none by name, would not choose."""
    from moe_ext._configs import config_indices
    from moe_ext._fused_moe_checks import check_fused_moe
    from moe_ext._fused_moe_kernels import Kernels
    from moe_ext._fused_moe_launch import launch_checked
    from moe_ext._fused_moe_run import run_fused_moe

    parameters = inspect.signature(run_fused_moe).parameters.values()
    every = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | options
    del every["out"]
    layer = check_fused_moe("fused_moe_out", problem.out, *problem.operands(0), **every)
    kernels = Kernels(*(config_indices()[name] for name in names))

    def call(index: int) -> list[Tensor]:
        launch_checked(layer, problem.out, *problem.operands(index), **every, chosen=kernels)
        return [problem.out]

    return call


def chosen(problem: LayerProblem, variant: Variant, sm_count: int) -> str:
    """Return the kernels that the op takes for both GEMMs."""
    from moe_ext._configs import all_configs
    from moe_ext._fused_moe_checks import check_fused_moe
    from moe_ext._fused_moe_kernels import choose_kernels

    scales = make_layer_scales(problem, variant.scale)._asdict()
    accumulate = _accumulate(variant)
    layer = check_fused_moe(
        "fused_moe_out", problem.out, *problem.operands(0), accumulate=accumulate, **scales
    )
    kernels = choose_kernels(layer, accumulate, False, variant.batch_invariant, sm_count)
    return "+".join(all_configs()[index].id for index in kernels)


def _accumulate(variant: Variant) -> str:
    return "fast" if variant.accumulate == "fast" else "promoted"
