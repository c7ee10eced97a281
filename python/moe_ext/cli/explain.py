"""`moe-ext explain`: which kernels would run for a GEMM or a layer, why, and what that costs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moe_ext._explain import explain as explain_gemm
from moe_ext._explain_layer import explain_fused_moe
from moe_ext.cli._console import console

app = typer.Typer(
    help="Say which kernels would run for a GEMM or a layer, why, and what that should cost.",
    add_completion=False,
)
_Dtype = Annotated[str, typer.Option(help="Of the weights: bf16 or fp8.")]
_Scales = Annotated[
    str | None, typer.Option(help="Of FP8 weights: tensor, channel or block; block by default.")
]
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
    dtype: _Dtype = "bf16",
    scales: _Scales = None,
    accumulate: Annotated[str, typer.Option(help="Of FP8: promoted or fast.")] = "promoted",
    sm_count: _SMs = None,
    measure_on: _MeasureOn = None,
) -> None:
    """Explain one grouped GEMM."""
    told = explain_gemm(
        dtype=dtype,
        num_rows=rows,
        num_groups=groups,
        n=n,
        k=k,
        accumulate=accumulate,
        block_scales=_layout(dtype, scales, "tensor" if accumulate == "fast" else "block")
        == "block",
        sm_count=sm_count,
        measure_on=measure_on,
    )
    console().print(str(told))


@app.command("layer")
def layer(
    tokens: Annotated[int, typer.Option(help="Of a call.")],
    top_k: Annotated[int, typer.Option(help="Experts of a token.")],
    experts: Annotated[int, typer.Option(help="Of the layer.")],
    hidden: Annotated[int, typer.Option(help="Hidden size.")],
    intermediate: Annotated[int, typer.Option(help="Intermediate size of an expert.")],
    dtype: _Dtype = "bf16",
    scales: _Scales = None,
    activation: Annotated[str, typer.Option(help="Of the experts.")] = "swiglu",
    sm_count: _SMs = None,
    measure_on: _MeasureOn = None,
) -> None:
    """Explain the two GEMMs of a layer."""
    layout = _layout(dtype, scales, "block")
    problem: dict[str, Any] = {} if layout is None else {"w13_scale": layout, "w2_scale": layout}
    told = explain_fused_moe(
        dtype=dtype,
        num_tokens=tokens,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_experts=experts,
        activation=activation,
        sm_count=sm_count,
        measure_on=measure_on,
        **problem,
    )
    console().print(str(told))


def _layout(dtype: str, scales: str | None, default: str) -> str | None:
    """Return the layout of scales, None where weights have none."""
    if dtype != "fp8":
        if scales is not None:
            raise typer.BadParameter(f"--scales must not be given for {dtype}, got {scales}")
        return None
    layout = default if scales is None else scales
    if layout not in ("tensor", "channel", "block"):
        raise typer.BadParameter(f"--scales must be tensor, channel or block, got {layout}")
    return layout
