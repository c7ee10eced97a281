"""Pictures of the commands: drawn without a display, written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_ext.precision._files import written


def make_figure(command: str, width: float, height: float) -> Any:
    """Return an empty figure, in inches.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{command}: the package `matplotlib` must be installed for pictures: "
            'pip install "moe-ext[cli]"'
        ) from None
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as PNG, which appears when it is complete."""
    figure.set_layout_engine("constrained")
    with written(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
