"""Times cells of one model in one dtype with an implementation of its experts, as rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from bench.e2e_model import STUB, experts_error
from bench.e2e_rows import DECODE, OP, TTFT, E2ERow
from bench.e2e_time import CallTime, TooSlow, time_decode, time_to_first_token
from bench.measure import Environment

UNCAPTURED = ("eager",)
"""They read the experts that are hit on the host, which no capture allows."""
MAX_ERROR = {"bf16": 0.02, "fp8": 0.1}


@dataclass(frozen=True)
class Cell:
    """One call whose time is asked for; of a decode step `prompt_tokens` is its position."""

    metric: str
    batch: int
    prompt_tokens: int


@dataclass(frozen=True)
class Grid:
    """What a run measures."""

    model: str
    cells: tuple[Cell, ...]
    samples: int
    max_call_seconds: float


class Runner:
    """Measures cells of one model in one dtype."""

    def __init__(self, model: Any, dtype: str, grid: Grid, environment: Environment) -> None:
        """Keep what all rows share."""
        self.model, self.dtype, self.grid, self.environment = model, dtype, grid, environment
        self._stubbed: dict[Cell, CallTime] = {}

    def rows(self, implementation: str, cells: Sequence[Cell]) -> Iterator[E2ERow]:
        """Check an implementation, then time it; a row with a reason where it fails."""
        reason, error = self._failure(implementation)
        for cell in cells:
            if reason:
                yield self._row(implementation, cell, error, skipped_reason=reason)
                continue
            try:
                self.model.set_experts_implementation(implementation)
                timed = self._time(cell, implementation not in UNCAPTURED)
                without = self._without_experts(cell, implementation not in UNCAPTURED)
            # An implementation of others may raise anything; the run goes on without it.
            except Exception as failure:
                why = failure if isinstance(failure, TooSlow) else _in_a_line(failure)
                yield self._row(implementation, cell, error, skipped_reason=str(why))
                self._clear()
                continue
            share = max(0.0, 1 - without.ms / timed.ms)
            yield self._row(implementation, cell, error, timed=timed, share=share)
            self._clear()

    def _failure(self, implementation: str) -> tuple[str, float | None]:
        """Return why an implementation cannot be timed, and its error."""
        try:
            self.model.set_experts_implementation(implementation)
            error = experts_error(self.model)
        except Exception as failure:  # see above
            return _in_a_line(failure), None
        if not error <= MAX_ERROR[self.dtype]:  # written so that NaN fails
            return f"wrong: error {error:.3g}, over {MAX_ERROR[self.dtype]:g}", None
        return "", round(error, 5)

    def _time(self, cell: Cell, captured: bool) -> CallTime:
        samples, limit = self.grid.samples, self.grid.max_call_seconds
        if cell.metric == TTFT:
            return time_to_first_token(self.model, cell.batch, cell.prompt_tokens, samples, limit)
        captured = captured and self.environment.device.type == "cuda"
        # A replay is short and its clock's resolution is not: more of them.
        return time_decode(
            self.model, cell.batch, captured, samples * (5 if captured else 1), limit
        )

    def _without_experts(self, cell: Cell, captured: bool) -> CallTime:
        """Time a cell with experts that return their input, once for all that run alike."""
        if not captured and cell.metric == DECODE:
            self.model.set_experts_implementation(STUB)
            return self._time(cell, captured=False)
        if cell not in self._stubbed:
            self.model.set_experts_implementation(STUB)
            self._stubbed[cell] = self._time(cell, captured)
        return self._stubbed[cell]

    def _row(
        self,
        implementation: str,
        cell: Cell,
        error: float | None,
        *,
        timed: CallTime | None = None,
        share: float | None = None,
        skipped_reason: str = "",
    ) -> E2ERow:
        value = None
        if timed is not None:
            value = timed.ms if cell.metric == TTFT else cell.batch / timed.ms * 1e3
        on_cuda = self.environment.device.type == "cuda"
        return E2ERow(
            op=OP,
            model=self.grid.model,
            dtype=self.dtype,
            implementation=implementation,
            metric=cell.metric,
            batch=cell.batch,
            prompt_tokens=cell.prompt_tokens,
            value=None if value is None else round(value, 3),
            call_ms=None if timed is None else round(timed.ms, 3),
            experts_share=None if share is None else round(share, 4),
            captured=cell.metric == DECODE and on_cuda and implementation not in UNCAPTURED,
            num_samples=0 if timed is None else timed.num_samples,
            max_err=error,
            skipped_reason=skipped_reason,
            device=self.environment.device_name,
            torch=torch.__version__,
            transformers=transformers.__version__,
            commit=self.environment.commit,
        )

    def _clear(self) -> None:
        """Give memory of graphs and of prompts back, so that no cell pays for another's."""
        if self.environment.device.type == "cuda":
            torch.cuda.empty_cache()


def _in_a_line(failure: BaseException) -> str:
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text[:200]}"
