"""`moe-ext explain`: which kernels would run for a GEMM or a layer, why, and what that costs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moe_ext._explain import explain as explain_gemm
from moe_ext._explain_layer import explain_fused_moe
from moe_ext.cli._arguments import check_device
from moe_ext.cli._console import console
from moe_ext.cli._named import GEMM, LAYER, named
from moe_ext.cli._problem import Accumulate, Dtype, Scales, gemm_options, layer_options

app = typer.Typer(
    help="Say which kernels would run for a GEMM or a layer, why, and what that should cost.",
    add_completion=False,
)
_SMs = Annotated[
    int | None, typer.Option("--sm-count", help="Multiprocessors of the GPU; 132 by default.")
]
_MeasureOn = Annotated[
    str | None, typer.Option(help="A CUDA device to time it on, such as cuda:0; none by default.")
]


@app.command("gemm")
def gemm(
    rows: Annotated[int, typer.Option(help="Rows of all groups: tokens times top-k.")],
    groups: Annotated[int, typer.Option(help="Matrices.")],
    n: Annotated[int, typer.Option("--n", "-n", help="Columns of the result.")],
    k: Annotated[int, typer.Option("--k", "-k", help="Summed dimension.")],
    dtype: Dtype = "bf16",
    scales: Scales = None,
    accumulate: Accumulate = "promoted",
    sm_count: _SMs = None,
    measure_on: _MeasureOn = None,
) -> None:
    """Explain one grouped GEMM."""
    problem: dict[str, Any] = gemm_options(dtype, scales, accumulate)
    if measure_on is not None:
        check_device("--measure-on", measure_on, "cuda")
    with named(GEMM):
        told = explain_gemm(
            num_rows=rows,
            num_groups=groups,
            n=n,
            k=k,
            sm_count=sm_count,
            measure_on=measure_on,
            **problem,
        )
    console().print(str(told))


@app.command("layer")
def layer(
    tokens: Annotated[int, typer.Option(help="Of a call.")],
    top_k: Annotated[int, typer.Option(help="Experts of a token.")],
    experts: Annotated[int, typer.Option(help="Of the layer.")],
    hidden: Annotated[int, typer.Option(help="Hidden size.")],
    intermediate: Annotated[int, typer.Option(help="Intermediate size of an expert.")],
    dtype: Dtype = "bf16",
    scales: Scales = None,
    activation: Annotated[str, typer.Option(help="Of the experts.")] = "swiglu",
    sm_count: _SMs = None,
    measure_on: _MeasureOn = None,
) -> None:
    """Explain the two GEMMs of a layer."""
    problem: dict[str, Any] = layer_options(dtype, scales, activation)
    if measure_on is not None:
        check_device("--measure-on", measure_on, "cuda")
    with named(LAYER):
        told = explain_fused_moe(
            num_tokens=tokens,
            top_k=top_k,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_experts=experts,
            sm_count=sm_count,
            measure_on=measure_on,
            **problem,
        )
    console().print(str(told))
