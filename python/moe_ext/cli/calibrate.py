"""`moe-ext calibrate`: statistics of a checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from moe_ext._activations import ACTIVATIONS
from moe_ext.cli._arguments import check_device_here, check_one_of, file_to_write
from moe_ext.cli._console import check_output, console, progress
from moe_ext.cli._named import named
from moe_ext.nn._pieces import LAYOUTS
from moe_ext.precision import calibrate_checkpoint


def calibrate(
    model_dir: Annotated[Path, typer.Argument(help="Folder with a safetensors checkpoint.")],
    data: Annotated[
        Path,
        typer.Argument(
            help="Safetensors file with layers.N.hidden_states, or input_ids for Transformers."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(parser=file_to_write, metavar="PATH", help="File of statistics to write."),
    ],
    scales: Annotated[
        str, typer.Option(help="Layout of FP8 scales to judge: block, channel or tensor.")
    ] = "block",
    min_rows: Annotated[
        int,
        typer.Option(
            min=1, max=2**31, help="Experts with fewer rows are judged from weights alone."
        ),
    ] = 32,
    activation: Annotated[
        str | None, typer.Option(help="Of the experts, if not what config.json says.")
    ] = None,
    device: Annotated[str, typer.Option(help="To measure on.")] = "cpu",
) -> None:
    """Measure what FP8 does to every expert and stage of a checkpoint."""
    check_one_of("--scales", scales, LAYOUTS)
    if activation is not None:
        check_one_of("--activation", activation, ACTIVATIONS)
    check_device_here("--device", device)
    check_output(out, model_dir, data)
    naming = named({"activation": "--activation"})
    with progress("calibrating", of_bytes=False) as advance, warnings.catch_warnings(), naming:
        # What the warning is about, the CPU, is what was asked for.
        warnings.filterwarnings("ignore", message="moe_ext: no CUDA device")
        found = calibrate_checkpoint(
            model_dir,
            data,
            scales=scales,
            min_rows=min_rows,
            activation=activation,
            device=device,
            progress=lambda _, total: advance(1, total),
        )
    found.stats.save(out)
    terminal = console()
    layers = found.stats.layers.values()
    few = sum(int(layer.from_weights.sum()) for layer in layers)
    terminal.print(
        f"{len(layers)} layers, {sum(layer.num_experts for layer in layers)} experts, {few} of "
        f"them judged from their weights alone: {out}"
    )
    if found.without_tokens:
        terminal.print(f"no tokens for {', '.join(found.without_tokens)}")
