"""`moe-ext report`: what FP8 does to a model, and what a plan leaves of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from moe_ext._dispatch import LAUNCH_US, READ_BYTES_PER_US
from moe_ext.cli._arguments import check_picture, file_to_write
from moe_ext.cli._console import check_output, console, decibels, mib, table
from moe_ext.cli._report_data import LayerReport, layer_reports
from moe_ext.precision import PrecisionPlan, PrecisionStats
from moe_ext.precision.layer_plan import STAGES


def report(
    stats: Annotated[Path, typer.Argument(help="File of statistics that calibrate wrote.")],
    plan: Annotated[Path | None, typer.Option(help="Plan, JSON; uniform FP8 by default.")] = None,
    png: Annotated[
        Path | None,
        typer.Option(parser=file_to_write, metavar="PATH", help="Picture to write, *.png."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=2**31, help="Of a call, for times.")] = 16,
    top: Annotated[int, typer.Option(min=0, help="How many stages of experts to list.")] = 20,
) -> None:
    """Show errors by layer, expert and stage, bytes, and times, before and after a plan."""
    if png is not None:
        check_output(png, stats, *([] if plan is None else [plan]))
        check_picture("--png", png)
    loaded = PrecisionStats.load(stats)
    own = None if plan is None else PrecisionPlan.load(plan)
    layers = layer_reports(loaded, own, tokens)
    terminal = console()
    terminal.print(_layer_table(layers, own is not None, tokens))
    terminal.print(
        "Errors are predicted, relative to each layer's own output: the root of noise over signal. "
        f"Times are those of reading the weights that {tokens} tokens hit, choosing as the "
        f"calibrated ones did, at {READ_BYTES_PER_US / 1e6:g} TB/s, and {LAUNCH_US:g} us for a "
        "launch: the dispatcher's cost model has no mixtures.",
    )
    if top:
        terminal.print(_stage_table(layers, own is not None, top))
    if png is not None:
        from moe_ext.cli._report_plot import draw

        draw(layers, own is not None, tokens, png)
        terminal.print(f"{png} written")


def _layer_table(layers: Sequence[LayerReport], planned: bool, tokens: int) -> Table:
    columns = {"layer": "left", "experts": "right", "error in FP8": "right", "dB": "right"}
    if planned:
        columns |= {"planned": "right", "dB ": "right", "in BF16": "right"}
    columns |= {"MiB in FP8": "right"}
    columns |= {"MiB planned": "right", "more": "right"} if planned else {}
    columns |= {f"us, T={tokens}": "right"}
    columns |= {"us planned": "right"} if planned else {}
    rows = table(f"{len(layers)} layers", columns)
    for own in layers:
        rows.add_row(own.name, str(own.stats.num_experts), *_cells([own], planned))
    if len(layers) > 1:
        rows.add_section()
        count = sum(own.stats.num_experts for own in layers)
        rows.add_row("all, errors in the mean", str(count), *_cells(layers, planned))
    return rows


def _cells(layers: Sequence[LayerReport], planned: bool) -> list[str]:
    """Return what stands behind a name: of a layer, or of all together."""
    before = math.fsum(float(own.before.sum()) for own in layers) / len(layers)
    after = math.fsum(float(own.after.sum()) for own in layers) / len(layers)
    fp8 = sum(own.fp8_bytes for own in layers)
    with_plan = sum(own.plan_bytes for own in layers)
    cells = [_percent(before), _snr(before)]
    if planned:
        cells += [_percent(after), _snr(after), str(sum(int(own.in_bf16.sum()) for own in layers))]
    cells.append(mib(fp8))
    if planned:
        cells += [mib(with_plan), f"{with_plan / fp8 - 1:.2%}"]
    cells.append(_us([own.fp8_us for own in layers]))
    return cells + ([_us([own.plan_us for own in layers])] if planned else [])


def _stage_table(layers: Sequence[LayerReport], planned: bool, top: int) -> Table:
    found = []
    for own in layers:
        for expert, errors in enumerate(own.before.tolist()):
            found += [(error, own, expert, index) for index, error in enumerate(errors)]
    found.sort(key=lambda item: -item[0])
    columns = dict.fromkeys(("layer", "expert", "stage"), "left")
    columns |= {"rows": "right", "SNR in FP8, dB": "right"}
    columns |= {"planned": "left", "SNR planned, dB": "right"} if planned else {}
    columns |= dict.fromkeys(("largest product", "kurtosis", "max/RMS"), "right")
    columns["judged by"] = "left"
    rows = table(f"the {min(top, len(found))} stages with the largest errors", columns)
    for error, own, expert, index in found[:top]:
        in_bf16, stats, place = bool(own.in_bf16[expert, index]), own.stats, (expert, index)
        cells = [own.name, str(expert), STAGES[index], str(int(stats.rows[expert])), _snr(error)]
        if planned:
            cells += ["bf16" if in_bf16 else "fp8", "-" if in_bf16 else _snr(error)]
        cells += [
            f"{float(stats.output_max[place]):,.4g}",
            f"{float(stats.kurtosis[place]):,.4g}",
            f"{float(stats.max_over_rms[place]):,.3g}",
            "weights" if bool(stats.from_weights[expert]) else "tokens",
        ]
        rows.add_row(*cells)
    return rows


def _percent(energy: float) -> str:
    return f"{math.sqrt(energy):.3%}"


def _snr(energy: float) -> str:
    return decibels(1 / energy) if energy else "-"


def _us(times: Sequence[float | None]) -> str:
    known = [time for time in times if time is not None]
    return f"{math.fsum(known):,.1f}" if len(known) == len(times) else "-"
