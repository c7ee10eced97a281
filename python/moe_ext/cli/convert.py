"""`moe-ext convert`: a checkpoint under a plan."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from moe_ext._activations import GATE_UP_LAYOUTS
from moe_ext.cli._arguments import check_one_of
from moe_ext.cli._console import console, progress, size
from moe_ext.cli._named import named
from moe_ext.precision import PrecisionPlan, convert_checkpoint

_OPTIONS = {"out": "--out", "gate_up_layout": "--gate-up-layout", "workers": "--workers"}


def convert(
    model_dir: Annotated[Path, typer.Argument(help="Folder with a safetensors checkpoint.")],
    plan: Annotated[Path, typer.Option(help="Plan, JSON.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    gate_up_layout: Annotated[
        str | None,
        typer.Option(help="Of packed gate and up, if not what config.json's model_type has."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads; one for each CPU by default, 4 at most.")
    ] = None,
) -> None:
    """Quantise the experts that a plan has in FP8, and copy everything else."""
    if gate_up_layout is not None:
        check_one_of("--gate-up-layout", gate_up_layout, GATE_UP_LAYOUTS)
    loaded = PrecisionPlan.load(plan)
    begin = time.perf_counter()
    with progress("converting", of_bytes=True) as advance, named(_OPTIONS):
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
        f"{done.num_fp8} stages of experts in FP8; {size(done.input_bytes)} became "
        f"{size(done.num_bytes)} in {done.num_files} files and {seconds:.1f} s "
        f"({size(done.input_bytes / seconds)}/s): {out}"
    )
    if done.unplanned:
        terminal.print(f"copied, as the plan does not name them: {', '.join(done.unplanned)}")
