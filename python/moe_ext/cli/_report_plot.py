"""The picture of `moe-ext report`: errors by layer, expert and stage, bytes and times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_ext.cli._figure import make_figure, save_figure
from moe_ext.cli._report_data import LayerReport
from moe_ext.precision.layer_plan import STAGES

_FLOOR = 1e-12
"""Smallest relative energy that is shown: 120 dB below the output."""


def draw(layers: Sequence[LayerReport], planned: bool, num_tokens: int, path: Path) -> None:
    """Write the picture, which appears when it is complete.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    parts = ("before", "after") if planned else ("before",)
    height = 3.0 + 2 * max(1.6, 0.12 * len(layers))
    width = 6.5 * max(len(parts), 2) if planned else 9.0
    figure = make_figure("report", width, height + 2.0)
    grid = figure.add_gridspec(3, 2, height_ratios=(1, 1, 0.9))
    maps = [_decibels(layers, part) for part in parts]
    shown = maps[0][maps[0] > -120]
    limits = (float(shown.min()), float(shown.max())) if shown.numel() else (-120.0, 0.0)
    images = []
    for row, stage in enumerate(STAGES):
        for column, (part, values) in enumerate(zip(parts, maps, strict=True)):
            place = grid[row, column] if planned else grid[row, :]
            axes = figure.add_subplot(place)
            images.append(_draw_map(axes, layers, values[:, :, row], limits))
            axes.set_title(f"{stage}, {'all in FP8' if part == 'before' else 'planned'}")
        figure.colorbar(images[-1], ax=figure.axes[-len(parts) :], label="noise over output, dB")
    names = ("FP8", "planned") if planned else ("FP8",)
    sizes = [[own.fp8_bytes / 2**20 for own in layers], [own.plan_bytes / 2**20 for own in layers]]
    times = [[own.fp8_us or 0.0 for own in layers], [own.plan_us or 0.0 for own in layers]]
    for column, (label, series) in enumerate(
        (("MiB", sizes), (f"us to read the weights, T={num_tokens}", times))
    ):
        _draw_bars(figure.add_subplot(grid[2, column]), layers, label, names, series)
    save_figure(figure, path)


def _decibels(layers: Sequence[LayerReport], part: str) -> torch.Tensor:
    """Return (layers, experts, 2): dB, NaN for experts that a layer has not or has in BF16."""
    count = max(own.stats.num_experts for own in layers)
    values = torch.full((len(layers), count, 2), torch.nan, dtype=torch.float64)
    for row, own in zip(values, layers, strict=True):
        energies: torch.Tensor = getattr(own, part)
        row[: energies.shape[0]] = 10 * energies.clamp_min(_FLOOR).log10()
        if part == "after":
            row[: energies.shape[0]][own.in_bf16] = torch.nan
    return values


def _draw_map(
    axes: Any, layers: Sequence[LayerReport], values: torch.Tensor, limits: tuple[float, float]
) -> Any:
    axes.set_facecolor("white")  # of what is NaN: in BF16
    image = axes.imshow(
        values.tolist(), aspect="auto", interpolation="nearest", vmin=limits[0], vmax=limits[1]
    )
    axes.set_xlabel("expert (white: in BF16)")
    _name_layers(axes.set_yticks, layers)
    return image


def _name_layers(set_ticks: Any, layers: Sequence[LayerReport]) -> None:
    """Name as many layers as there is room for."""
    step = -(-len(layers) // 16)
    places = range(0, len(layers), step)
    set_ticks(list(places), [_short(layers[place].name) for place in places])


def _short(name: str) -> str:
    numbers = [part for part in name.split(".") if part.isdigit()]
    return f"layer {numbers[0]}" if numbers else name


def _draw_bars(
    axes: Any,
    layers: Sequence[LayerReport],
    label: str,
    names: Sequence[str],
    series: Sequence[Sequence[float]],
) -> None:
    width = 0.8 / len(names)
    for index, (name, values) in enumerate(zip(names, series, strict=False)):
        places = [row + (index - (len(names) - 1) / 2) * width for row in range(len(layers))]
        axes.bar(places, values, width, label=name)
    axes.set_ylabel(label)
    _name_layers(axes.set_xticks, layers)
    axes.tick_params(axis="x", rotation=0 if len(layers) <= 6 else 60)
    axes.legend(loc="lower right")
