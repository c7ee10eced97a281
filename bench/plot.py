"""A PNG plot of result rows: time and floor over tokens, log-log, one small panel per case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.rows import Row
from bench.tables import cases_and_tokens, pair_rows

COLUMNS = 4
# (provider, dtype, accumulate) -> label, colour, line style
LINES = {
    ("moe_ext", "bf16", "fp32"): ("moe_ext BF16", "tab:blue", "-"),
    ("moe_ext", "fp8", "promoted"): ("moe_ext FP8", "tab:red", "-"),
    ("torch", "bf16", "fp32"): ("torch BF16", "tab:blue", ":"),
    ("torch", "fp8", "fast"): ("torch FP8", "tab:red", ":"),
}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write the plot; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pairs = pair_rows(rows)
    cases, _ = cases_and_tokens(pairs)
    columns = min(COLUMNS, len(cases))
    height = -(-len(cases) // columns)
    figure, axes = pyplot.subplots(
        height, columns, figsize=(3.6 * columns, 3.0 * height + 0.6), squeeze=False, sharex=True
    )
    for axis, case in zip(axes.flat, cases, strict=False):
        own = [row for row in pairs if row.case == case]
        for key, (label, colour, style) in LINES.items():
            line = sorted(
                (row.num_tokens, row.median_us or 0.0, row.floor_us)
                for row in own
                if (row.provider, row.dtype, row.accumulate) == key
            )
            if not line:
                continue
            tokens, medians, floors = zip(*line, strict=True)
            axis.plot(tokens, medians, style, color=colour, label=label, marker=".", markersize=4)
            if key[0] == "moe_ext":
                name = f"floor {key[1].upper()}"
                axis.plot(tokens, floors, "--", color=colour, alpha=0.45, linewidth=1, label=name)
        axis.set(xscale="log", yscale="log", title=case)
        axis.set_xscale("log", base=2)
        axis.grid(visible=True, which="major", alpha=0.3)
    for axis in list(axes.flat)[len(cases) :]:
        axis.set_visible(False)
    figure.supxlabel("tokens (before top-k)")
    figure.supylabel("us, gate/up and down GEMM together")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels) or 1, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.45 / (3.0 * height + 0.6)))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
