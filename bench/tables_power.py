"""A Markdown table of the two regimes of the power limit, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from bench.layouts import CONTIGUOUS
from bench.lookup import ROUTING
from bench.ops import PAIR
from bench.power import BURST, SUSTAINED
from bench.rows import Row, in_regime, measurement
from bench.tables import markdown_table
from bench.verdicts import PREFILL_TOKENS


def power_table(rows: Sequence[Row]) -> str:
    """Return TFLOP/s in bursts and sustained where sustained rows are; empty without them."""
    bursts = {measurement(row): row for row in in_regime(rows) if row.power == BURST}
    body = []
    for row in in_regime(rows, SUSTAINED):
        if (
            row.op != PAIR
            or row.routing != ROUTING
            or row.layout != CONTIGUOUS
            or row.num_tokens != PREFILL_TOKENS
            or row.tflops is None
        ):
            continue
        burst = bursts.get(measurement(row))
        rate = burst.tflops if burst is not None else None
        body.append(
            [
                row.case,
                row.provider,
                row.dtype.upper(),
                row.scale,
                row.accumulate,
                "-" if rate is None else f"{rate:.0f}",
                f"{row.tflops:.0f}",
                "-" if rate is None else f"{row.tflops / rate:.2f}",
            ]
        )
    if not body:
        return ""
    header = [
        "case",
        "provider",
        "dtype",
        "scales",
        "sums",
        BURST,
        SUSTAINED,
        f"{SUSTAINED} / {BURST}",
    ]
    legend = (
        f"TFLOP/s of the pair at T = {PREFILL_TOKENS}: in bursts after a pause, and back to back "
        "at the card's power limit (`bench/README.md`)."
    )
    return f"{legend}\n\n{markdown_table(header, body)}"
