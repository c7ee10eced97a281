"""The work of `moe-ext bench`: a measurement for each count, as table, JSON or picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import typer

from moe_ext._explain import Explanation
from moe_ext._explain_layer import LayerExplanation
from moe_ext._library import cuda_device
from moe_ext.cli._arguments import check_picture
from moe_ext.cli._console import check_writable, console, progress, table

Told = Explanation | LayerExplanation


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What is measured, over what.

    Attributes:
        counted: what a count is of: "tokens" or "rows".
        counts: how many, one measurement each.
        measure: makes the measurement of a count.
        title: the problem in words.
    """

    counted: str
    counts: Sequence[int]
    measure: Callable[[int], Told]
    title: str


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A count, and what was told of it."""

    count: int
    told: Told

    @property
    def us(self) -> float:
        """Median microseconds."""
        measured = self.told.measured_us
        assert measured is not None, "every problem of a sweep is measured"
        return measured

    @property
    def ratio(self) -> float:
        """Time over the floor."""
        return self.us / self.told.floor_us

    @property
    def kernels(self) -> str:
        """The kernel of the GEMM, or of a layer's two."""
        if isinstance(self.told, Explanation):
            return self.told.config
        return " + ".join(dict.fromkeys((self.told.gate_up.config, self.told.down.config)))


def counts_of(option: str, text: str) -> list[int]:
    """Return whole numbers with commas between, ascending."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(
            f"{option} must be whole numbers from 1 on with commas between, as 1,16,256, got "
            f"{text!r}"
        )
    return sorted({int(part) for part in parts})


def run(sweep: Sweep, device: str, as_json: bool, plot: Path | None) -> None:
    """Measure, and show or write what came of it."""
    if plot is not None:
        check_writable(plot)
        check_picture("--plot", plot)
    name = _device_name(device)
    found = []
    with progress("timing", of_bytes=False) as advance:
        advance(0, len(sweep.counts))
        for count in sweep.counts:
            found.append(Measurement(count, sweep.measure(count)))
            advance(1, len(sweep.counts))
    if as_json:
        print(json.dumps([_json_row(own, name) for own in found], indent=2))
    else:
        _show(sweep, name, found)
    if plot is not None:
        from moe_ext.cli._bench_plot import draw

        draw(sweep, name, found, plot)
        if not as_json:
            console().print(f"{plot} written")


def _device_name(device: str) -> str:
    """Return the name of the GPU; without one, say so before any work is done."""
    try:
        index, _ = cuda_device("bench", device)
    except (RuntimeError, ValueError) as error:
        reason = str(error).removeprefix("moe_ext: ").removeprefix("bench: `device` ")
        raise typer.BadParameter(
            f"--device must name a GPU that runs the kernels, got {device}: {reason}"
        ) from None
    return torch.cuda.get_device_name(index)


def _json_row(own: Measurement, device: str) -> dict[str, object]:
    return {**dataclasses.asdict(own.told), "ratio_to_floor": own.ratio, "device": device}


def _show(sweep: Sweep, device: str, found: Sequence[Measurement]) -> None:
    numbers = (sweep.counted, "us", "floor us", "us / floor", "predicted us")
    columns = {**dict.fromkeys(numbers, "right"), "kernels": "left"}
    rows = table(f"{sweep.title}; {device}", columns)
    for own in found:
        rows.add_row(
            str(own.count),
            f"{own.us:,.1f}",
            f"{own.told.floor_us:,.1f}",
            f"{own.ratio:.2f}",
            f"{own.told.predicted_us:,.1f}",
            own.kernels,
        )
    terminal = console()
    terminal.print(rows)
    terminal.print(
        "Medians of replays of a CUDA graph, weights out of L2, rows spread evenly. The floor is "
        "an H200's: weights read once, or the dense rate, plus a launch."
    )
