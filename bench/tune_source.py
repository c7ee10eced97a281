"""The source of the dispatcher's tables: what `bench.tune_tables` writes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

from bench.rows import Row
from bench.source import Call, lay_out, quoted
from bench.tune_points import Point, Shape, TableKey

# What a table leaves to the cost model: fewer tiles of weights than this share of the fewest seen.
FEWEST_TILES = 0.75
_TITLES = {
    ("bf16", "fp32"): "BF16",
    ("fp8", "promoted"): "FP8, scales constant along K",
    ("fp8", "fast"): "FP8 whose sums stay in the tensor core",
    ("fp8", "block"): "FP8 with scales per block",
    ("fp8", "block_swapped"): "FP8 with scales per block that only Swap-AB kernels take",
}


def file_name(table: TableKey) -> str:
    """Return the name of a table's module."""
    op, dtype, sums = table
    kind = dtype if dtype == "bf16" else sums
    return f"_dispatch_table_{'layer_' if op == 'layer' else ''}{kind}.py"


def source_of(table: TableKey, points: Sequence[Point]) -> str:
    """Return a table's module."""
    op, dtype, sums = table
    shapes: dict[Shape, list[Point]] = {}
    for point in points:
        shapes.setdefault(point.shape, []).append(point)
    tiles = min(groups * math.ceil(n / 64) for groups, n, _ in shapes)
    rows = [row for point in points for visit in point.problem.visits for row in visit.rows]
    call = Call(
        "Points",
        [
            quoted(dtype),
            quoted(sums),
            *(_tuned(shape, own) for shape, own in shapes.items()),
            _where(points, rows),
            f"sm_count={rows[0].sm_count or 132}",
            f"min_weight_tiles={math.ceil(FEWEST_TILES * tiles)}",
        ],
    )
    what = f"layers in {_TITLES[dtype, sums]}" if op == "layer" else _TITLES[dtype, sums]
    return "\n".join(
        [
            f'"""The measured choices for {what}.',
            "",
            *_described(table, points, rows),
            '"""',
            "",
            "from __future__ import annotations",
            "",
            "from moe_ext._dispatch_points import Points, tuned",
            "",
            lay_out(call, before="CHOICES = "),
            "",
        ]
    )


def _tuned(shape: Shape, points: Sequence[Point]) -> Call:
    choices = [
        Call("", [str(point.num_rows), quoted(point.kernel), quoted(point.measurement)])
        for point in sorted(points, key=lambda point: point.num_rows)
    ]
    return Call("tuned", [Call("", [quoted(points[0].name), *map(str, shape)]), *choices])


def _where(points: Sequence[Point], rows: Sequence[Row]) -> Call | str:
    files = _sorted(visit.file for point in points for visit in point.problem.visits)
    devices, routings = _sorted(row.device for row in rows), _sorted(row.routing for row in rows)
    text = f"{', '.join(devices)}, {', '.join(routings)}, {', '.join(files)}"
    if len(text) <= 80:
        return f"where={quoted(text)}"
    parts = textwrap.wrap(text, 80, drop_whitespace=False, break_long_words=False)
    return "where=(\n        " + "\n        ".join(map(quoted, parts)) + "\n    )"


def _sorted(words: Iterable[str]) -> list[str]:
    return sorted(set(words))


def _described(table: TableKey, points: Sequence[Point], rows: Sequence[Row]) -> list[str]:
    """Return the part of the docstring that says how the table came to be."""
    what = "whole layers" if table[0] == "layer" else "both GEMMs of a layer, or one of them alone"
    again = [
        abs(row.again_us / row.median_us - 1)
        for row in rows
        if row.again_us is not None and row.median_us is not None
    ]
    clocks = [row.sm_mhz for row in rows if row.sm_mhz is not None]
    checks = []
    if again:
        checks.append(f"second timings within {100 * max(again):.1f} %")
    if clocks:
        checks.append(f"SM clocks {min(clocks):.0f} to {max(clocks):.0f} MHz")
    text = (
        "Written by bench/tune_tables.py: change the rows, not this. A choice is a number of rows, "
        "a kernel, and what was measured: tokens, microseconds of "
        f"{what}, time over the best's, and of how many kernels it was chosen. "
        f"{len(points)} points; commit {', '.join(_sorted(row.commit for row in rows))}, torch "
        f"{', '.join(_sorted(row.torch for row in rows))}, power "
        f"{', '.join(_sorted(row.power for row in rows))}"
        f"{''.join(f'; {check}' for check in checks)}."
    )
    return textwrap.wrap(text, 100)
