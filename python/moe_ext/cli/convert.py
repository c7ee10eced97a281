"""`moe-ext convert`: a checkpoint under a plan."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from moe_ext.cli._console import console, progress
from moe_ext.precision import PrecisionPlan, convert_checkpoint


def convert(
    model_dir: Annotated[Path, typer.Argument(help="Folder with a safetensors checkpoint.")],
    plan: Annotated[Path, typer.Option(help="Plan, JSON.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    gate_up_layout: Annotated[
        str | None,
        typer.Option(help="Of packed gate and up, if not what config.json's model_type has."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Threads; one for each CPU by default, 4 at most.")
    ] = None,
) -> None:
    """Quantise the experts that a plan has in FP8, and copy everything else."""
    loaded = PrecisionPlan.load(plan)
    begin = time.perf_counter()
    with progress("converting", of_bytes=True) as advance:
        done = convert_checkpoint(
            model_dir,
            loaded,
            out,
            gate_up_layout=gate_up_layout,
            workers=workers,
            progress=advance,
        )
    seconds = time.perf_counter() - begin
    terminal = console()
    terminal.print(
        f"{done.num_fp8} stages of experts in FP8; {done.input_bytes / 1e9:.2f} GB became "
        f"{done.num_bytes / 1e9:.2f} GB in {done.num_files} files and {seconds:.1f} s "
        f"({done.input_bytes / seconds / 1e6:.0f} MB/s): {out}"
    )
    if done.unplanned:
        terminal.print(f"copied, as the plan does not name them: {', '.join(done.unplanned)}")
