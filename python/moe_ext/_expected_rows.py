"""`expected_rows` of the masked ops: what they may be, and what they say of a problem's size."""

from __future__ import annotations


def check_expected_rows(op: str, expected_rows: int | None) -> None:
    """Raise a ValueError for less than no rows; more than a buffer has are as many as it has."""
    if expected_rows is not None and expected_rows < 0:
        raise ValueError(f"{op}: `expected_rows` must not be negative, got {expected_rows}")


def rows_to_choose_for(expected_rows: int | None, max_rows: int) -> int:
    """Return for how many rows of a buffer of `max_rows`, at least 1, kernels are chosen."""
    return max_rows if expected_rows is None else max(1, min(expected_rows, max_rows))
