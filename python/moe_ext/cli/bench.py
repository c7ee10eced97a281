"""`moe-ext bench`: what a layer or a GEMM takes on this GPU, over how much it has to do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_ext._explain import explain as explain_gemm
from moe_ext._explain_layer import explain_fused_moe
from moe_ext.cli._arguments import file_to_write
from moe_ext.cli._bench_run import Sweep, counts_of, run
from moe_ext.cli._named import GEMM, LAYER, named
from moe_ext.cli._problem import Accumulate, Dtype, Scales, gemm_options, layer_options

app = typer.Typer(
    help="Time a layer or a GEMM on a GPU over token counts, beside the least it can take.",
    add_completion=False,
)
_DEVICE = {"measure_on": "--device"}
_Device = Annotated[str, typer.Option(help="CUDA device to time on.")]
_Json = Annotated[bool, typer.Option("--json", help="A JSON list of rows in place of the table.")]
_Plot = Annotated[
    Path | None, typer.Option(parser=file_to_write, metavar="PATH", help="Picture to write, PNG.")
]


@app.command("layer")
def layer(
    top_k: Annotated[int, typer.Option(help="Experts of a token.")],
    experts: Annotated[int, typer.Option(help="Of the layer.")],
    hidden: Annotated[int, typer.Option(help="Hidden size.")],
    intermediate: Annotated[int, typer.Option(help="Intermediate size of an expert.")],
    tokens: Annotated[str, typer.Option(help="Of a call: counts with commas between.")] = (
        "1,4,16,64,256,1024"
    ),
    dtype: Dtype = "bf16",
    scales: Scales = None,
    activation: Annotated[str, typer.Option(help="Of the experts.")] = "swiglu",
    device: _Device = "cuda",
    as_json: _Json = False,
    plot: _Plot = None,
) -> None:
    """Time whole layers, from hidden states and routing to the output."""
    problem: dict[str, Any] = layer_options(dtype, scales, activation)
    measure = partial(
        explain_fused_moe,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_experts=experts,
        measure_on=device,
        **problem,
    )
    layout = problem.get("w13_scale")
    title = (
        f"layer in {_kind(dtype, layout)}: top {top_k} of {experts} experts, hidden {hidden}, "
        f"intermediate {intermediate}"
    )
    sweep = Sweep(
        "tokens", counts_of("--tokens", tokens), lambda count: measure(num_tokens=count), title
    )
    with named(LAYER | _DEVICE):
        run(sweep, device, as_json, plot)


@app.command("gemm")
def gemm(
    groups: Annotated[int, typer.Option(help="Matrices.")],
    n: Annotated[int, typer.Option("--n", "-n", help="Columns of the result.")],
    k: Annotated[int, typer.Option("--k", "-k", help="Summed dimension.")],
    rows: Annotated[
        str, typer.Option(help="Of all groups, tokens times top-k: counts with commas between.")
    ] = "8,32,128,512,2048,8192",
    dtype: Dtype = "bf16",
    scales: Scales = None,
    accumulate: Accumulate = "promoted",
    device: _Device = "cuda",
    as_json: _Json = False,
    plot: _Plot = None,
) -> None:
    """Time one grouped GEMM."""
    problem: dict[str, Any] = gemm_options(dtype, scales, accumulate)
    measure = partial(explain_gemm, num_groups=groups, n=n, k=k, measure_on=device, **problem)
    layout = "block" if problem["block_scales"] else scales
    title = f"GEMM in {_kind(dtype, layout)}: {groups} groups, n {n}, k {k}"
    sweep = Sweep("rows", counts_of("--rows", rows), lambda count: measure(num_rows=count), title)
    with named(GEMM | _DEVICE):
        run(sweep, device, as_json, plot)


def _kind(dtype: str, layout: str | None) -> str:
    return dtype if layout is None else f"{dtype}, scales per {layout}"
