"""The compiled kernels that can run a cell, by name, and the dispatcher's choice among them.

A configuration names one kernel, or where the two GEMMs of a pair or layer have different ones,
two joined by "+".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bench.layer import TENSOR_STATIC
from bench.ops import LAYER
from bench.problem import Cell
from bench.providers.base import Variant, joined
from bench.providers.moe_ext import dispatched, sums_of
from bench.scales import count_segments

if TYPE_CHECKING:
    from moe_ext._dispatch import Decision
    from moe_ext._fused_moe_checks import Layer

H200_SMS = 132
MANY_TOKENS = 64


def candidates(cell: Cell, variant: Variant, sm_count: int = H200_SMS) -> list[str]:
    """List the configurations worth timing on a cell, the dispatcher's choice first.

    A GEMM alone has every kernel that takes it. A pair has one for both GEMMs, since two different
    ones cost more than the better saves (docs/notes/cold-code.md), but where the down GEMM can run
    in plain order and the first cannot: then those too, behind tiles of many tokens. A layer has
    each kernel of the first GEMM, with what the second alone would take, and with itself or, where
    it cannot run both, the kernel most like it.
    """
    first = choice(cell, variant, sm_count)
    others = _of_layer(cell, variant, sm_count) if cell.op == LAYER else _of_gemms(cell, variant)
    return list(dict.fromkeys([first, *others]))


def choice(cell: Cell, variant: Variant, sm_count: int = H200_SMS) -> str:
    """Return the configuration that the dispatcher of the installed package takes."""
    if cell.op == LAYER:
        from moe_ext._configs import all_configs
        from moe_ext._fused_moe_kernels import choose_kernels

        kernels = choose_kernels(
            layer_of(cell, variant),
            accumulate_of(variant),
            False,
            variant.batch_invariant,
            sm_count,
        )
        return joined([all_configs()[index].id for index in kernels])
    shapes = [(cell.case.num_experts, *cell.case.stage_shape(stage)) for stage in cell.stages]
    return joined(
        [
            dispatched(variant, stage, cell.num_rows, shape, sm_count)
            for stage, shape in zip(cell.stages, shapes, strict=True)
        ]
    )


def stage_sums(cell: Cell, variant: Variant) -> list[str]:
    """Return dispatch's name of the way to sum of each stage."""
    return [
        sums_of(variant.scale, variant.accumulate, stage, cell.case.stage_shape(stage)[0])
        for stage in cell.stages
    ]


def _of_gemms(cell: Cell, variant: Variant) -> Iterable[str]:
    from moe_ext._configs import matching_configs

    first, *rest = (matching_configs(variant.dtype, sums) for sums in stage_sums(cell, variant))
    if not rest:
        return [config.id for config in first]
    [second] = rest
    only_second = [config for config in second if config not in first]
    return [
        joined([config.id, other.id])
        for config in first
        for other in [
            *([config] if config in second else []),
            *(only_second if config.tile_tokens >= MANY_TOKENS else []),
        ]
    ]


def _of_layer(cell: Cell, variant: Variant, sm_count: int) -> Iterable[str]:
    from moe_ext._configs import matching_configs
    from moe_ext._fused_moe_kernels import gated_candidates, nearest_kernel

    layer = layer_of(cell, variant)
    sums = "block" if variant.scale == "block128" else accumulate_of(variant)
    of_rows = matching_configs(variant.dtype, sums)
    alone = decision_of(cell, variant, "down", sums, sm_count).config
    for gate_up in gated_candidates(layer, gated_sums(variant), bias=False):
        runs_both = gate_up.output == "either" and layer.hidden_size % 16 == 0
        for down in (gate_up if runs_both else nearest_kernel(gate_up, of_rows), alone):
            yield joined([gate_up.id, down.id])


def decision_of(cell: Cell, variant: Variant, stage: str, sums: str, sm_count: int) -> Decision:
    """Return the dispatcher's answer for one GEMM of a cell, whose sums are dispatch's `sums`."""
    from moe_ext._dispatch import choose

    n, k = cell.case.stage_shape(stage)
    return choose(
        dtype=variant.dtype,
        accumulate=sums,
        num_rows=cell.num_rows,
        num_groups=cell.case.num_experts,
        n=n,
        k=k,
        sm_count=sm_count,
    )


def gated_sums(variant: Variant) -> str:
    """Return how the first GEMM of a layer sums."""
    if variant.dtype == "bf16":
        return "fp32"
    return "block" if variant.scale == "block128" else "promoted"


def layer_of(cell: Cell, variant: Variant) -> Layer:
    """Return what the op makes of a call of the cell, without tensors."""
    from moe_ext._activations import CONCATENATED, resolved
    from moe_ext._fused_moe_checks import Layer
    from moe_ext._fused_moe_scales import WeightScale

    case = cell.case
    scales: Sequence[WeightScale | None] = (None, None)
    if variant.dtype == "fp8":
        granularity = {"tensor": "tensor", TENSOR_STATIC: "tensor", "channel": "row"}
        of_rows = granularity.get(variant.scale, "1x128")
        scales = [
            WeightScale(of_rows, count_segments(stage, case.stage_shape(stage)[0], variant.scale))
            for stage in cell.stages
        ]
    alpha, limit = resolved("swiglu", None, None)
    return Layer(
        num_tokens=cell.num_tokens,
        top_k=case.top_k,
        hidden_size=case.hidden_size,
        intermediate_size=case.intermediate_size,
        num_experts=case.num_experts,
        fp8=variant.dtype == "fp8",
        activation="swiglu",
        gated=True,
        alpha=alpha,
        limit=limit,
        gate_up_layout=CONCATENATED,
        w13_scale=scales[0],
        w2_scale=scales[1],
    )


def accumulate_of(variant: Variant) -> str:
    """Return what a layer's call says of how to sum."""
    return "fast" if variant.accumulate == "fast" else "promoted"
