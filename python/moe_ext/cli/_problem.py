"""What the commands about a GEMM or a layer ask for alike."""

from __future__ import annotations

from typing import Annotated

import typer

Dtype = Annotated[str, typer.Option(help="Of the weights: bf16 or fp8.")]
Scales = Annotated[
    str | None, typer.Option(help="Of FP8 weights: tensor, channel or block; block by default.")
]
Accumulate = Annotated[str, typer.Option(help="Of FP8: promoted or fast.")]


def scale_layout(dtype: str, scales: str | None, default: str) -> str | None:
    """Return the layout of scales, None where weights have none."""
    if dtype != "fp8":
        if scales is not None:
            raise typer.BadParameter(f"--scales must not be given for {dtype}, got {scales}")
        return None
    layout = default if scales is None else scales
    if layout not in ("tensor", "channel", "block"):
        raise typer.BadParameter(f"--scales must be tensor, channel or block, got {layout}")
    return layout


def gemm_options(dtype: str, scales: str | None, accumulate: str) -> dict[str, object]:
    """Return what `moe_ext.explain` takes of a GEMM's dtype and scales."""
    layout = scale_layout(dtype, scales, "tensor" if accumulate == "fast" else "block")
    return {"dtype": dtype, "accumulate": accumulate, "block_scales": layout == "block"}


def layer_options(dtype: str, scales: str | None) -> dict[str, object]:
    """Return what `moe_ext.explain_fused_moe` takes of a layer's dtype and scales."""
    layout = scale_layout(dtype, scales, "block")
    scaled = {} if layout is None else {"w13_scale": layout, "w2_scale": layout}
    return {"dtype": dtype, **scaled}
