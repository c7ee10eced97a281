"""What the commands about a GEMM or a layer ask for alike."""

from __future__ import annotations

from typing import Annotated

import typer

from moe_ext._activations import ACTIVATIONS
from moe_ext._dispatch import ITEM_BYTES
from moe_ext.cli._arguments import check_one_of
from moe_ext.nn._pieces import LAYOUTS

Dtype = Annotated[str, typer.Option(help="Of the weights: bf16 or fp8.")]
Scales = Annotated[
    str | None, typer.Option(help="Of FP8 weights: tensor, channel or block; block by default.")
]
Accumulate = Annotated[str, typer.Option(help="Of FP8: promoted or fast.")]


def scale_layout(dtype: str, scales: str | None, default: str) -> str | None:
    """Return the layout of scales, None where weights have none."""
    check_one_of("--dtype", dtype, ITEM_BYTES)
    if dtype != "fp8":
        if scales is not None:
            raise typer.BadParameter(f"--scales must not be given for {dtype}, got {scales}")
        return None
    layout = default if scales is None else scales
    check_one_of("--scales", layout, LAYOUTS)
    return layout


def gemm_options(dtype: str, scales: str | None, accumulate: str) -> dict[str, object]:
    """Return what `moe_ext.explain` takes of a GEMM's dtype and scales."""
    check_one_of("--accumulate", accumulate, ("promoted", "fast"))
    layout = scale_layout(dtype, scales, "tensor" if accumulate == "fast" else "block")
    if accumulate == "fast" and (layout is None or layout == "block"):
        got = f"--dtype {dtype}" if layout is None else f"--scales {layout}"
        raise typer.BadParameter(
            f"--accumulate must be promoted but for fp8 with scales per tensor or channel, got "
            f"fast with {got}"
        )
    return {"dtype": dtype, "accumulate": accumulate, "block_scales": layout == "block"}


def layer_options(dtype: str, scales: str | None, activation: str) -> dict[str, object]:
    """Return what `moe_ext.explain_fused_moe` takes of a layer's dtype, scales and activation."""
    check_one_of("--activation", activation, ACTIVATIONS)
    layout = scale_layout(dtype, scales, "block")
    scaled = {} if layout is None else {"w13_scale": layout, "w2_scale": layout}
    return {"dtype": dtype, "activation": activation, **scaled}
