"""The row of a measurement, by what a bar or a table asks for."""

from __future__ import annotations

from collections.abc import Iterable

from bench.layouts import CONTIGUOUS
from bench.ops import PAIR
from bench.power import BURST
from bench.rows import Row, in_regime

ROUTING = "zipf0.6"
# Accumulation that a bar without further words means.
DEFAULT_ACCUMULATE = {"bf16": "fp32", "fp8": "promoted"}
# Scales that a provider's FP8 rows have where nothing else is asked for: the layout in which
# providers are compared.
MAIN_SCALE = {"moe_ext": "tensor", "torch": "channel", "deep_gemm": "block128"}
TORCH_ACCUMULATES = {"bf16": ("fp32",), "fp8": ("promoted", "fast")}


def main_scale(provider: str, dtype: str) -> str:
    """Return the layout of scales in which a provider is compared with others."""
    return MAIN_SCALE[provider] if dtype == "fp8" else "none"


def time_us(row: Row | None) -> float | None:
    """Return the median of a row that may not be there."""
    return None if row is None else row.median_us


class Results:
    """Rows of one op, routing kind, regime of the power limit, layout of the activations and mode,
    by default of the pair."""

    def __init__(
        self,
        rows: Iterable[Row],
        routing: str = ROUTING,
        power: str = BURST,
        layout: str = CONTIGUOUS,
        op: str = PAIR,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """Index the last row of every measurement."""
        self._rows = {
            (row.provider, row.case, row.dtype, row.scale, row.accumulate, row.num_tokens): row
            for row in in_regime(rows, power)
            if (row.op, row.routing, row.layout, row.batch_invariant)
            == (op, routing, layout, batch_invariant)
        }

    def get(
        self,
        provider: str,
        case: str,
        dtype: str,
        tokens: int,
        *,
        accumulate: str | None = None,
        scale: str | None = None,
    ) -> Row | None:
        """Return a row that has a time, by default in the main layout and accumulation."""
        scale = scale or main_scale(provider, dtype)
        accumulate = accumulate or DEFAULT_ACCUMULATE[dtype]
        row = self._rows.get((provider, case, dtype, scale, accumulate, tokens))
        return row if row is not None and row.median_us is not None else None

    def moe_ext(
        self, case: str, dtype: str, tokens: int, *, scale: str | None = None
    ) -> Row | None:
        """Return this project's row with the default accumulation."""
        return self.get("moe_ext", case, dtype, tokens, scale=scale)

    def torch_us(self, case: str, dtype: str, tokens: int) -> float | None:
        """Return PyTorch's time in the same run, the faster of its accumulations."""
        rows = [
            self.get("torch", case, dtype, tokens, accumulate=kind)
            for kind in TORCH_ACCUMULATES[dtype]
        ]
        times = [row.median_us for row in rows if row is not None and row.median_us is not None]
        return min(times, default=None)

    def torch_skipped(self, case: str, dtype: str, tokens: int) -> str:
        """Return why PyTorch was not timed; empty when it was or was not asked."""
        scale = main_scale("torch", dtype)
        rows = [
            self._rows.get(("torch", case, dtype, scale, kind, tokens))
            for kind in TORCH_ACCUMULATES[dtype]
        ]
        return next((row.skipped_reason for row in rows if row is not None), "")

    def cells(self, scale: str | None = None) -> list[tuple[str, str, int]]:
        """Return (case, dtype, tokens) of this project's rows with scales of a kind, by default the
        main one, measured or not, in order."""
        return list(
            dict.fromkeys(
                (case, dtype, tokens)
                for provider, case, dtype, kind, _, tokens in self._rows
                if provider == "moe_ext" and kind == (scale or main_scale(provider, dtype))
            )
        )
