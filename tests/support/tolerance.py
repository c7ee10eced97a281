"""The public accuracy gate, the only one in the suite, and bitwise comparison."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_DISSIMILARITY = 1e-5  # 1 - 2<x, y> / (|x|^2 + |y|^2)
MAX_ERROR = 0.01  # largest difference over the largest reference value


def dissimilarity(out: Tensor, expected: Tensor) -> float:
    """1 - 2<x, y> / (|x|^2 + |y|^2) in float64; 0 for two zero tensors."""
    x, y = out.double(), expected.double()
    squares = (x * x).sum() + (y * y).sum()
    return 0.0 if squares == 0 else float(1 - 2 * (x * y).sum() / squares)


def max_error(out: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute reference value."""
    if expected.numel() == 0:
        return 0.0
    largest = expected.abs().max().double()
    difference = (out.double() - expected.double()).abs().max()
    return float(difference / largest) if largest > 0 else float(difference)


def assert_close_to_reference(out: Tensor, expected: Tensor, offs: Tensor | None = None) -> None:
    """Hold `out` against the float32 reference of the same rows."""
    differ, error = dissimilarity(out, expected), max_error(out, expected)
    # Written so that NaN fails.
    if not (differ < MAX_DISSIMILARITY and error < MAX_ERROR):
        raise AssertionError(
            f"dissimilarity {differ:.3g} (limit {MAX_DISSIMILARITY}), largest error {error:.3g} "
            f"(limit {MAX_ERROR}); {_worst(out, expected, offs)}"
        )


def assert_same_bits(out: Tensor, expected: Tensor, offs: Tensor | None = None) -> None:
    """Hold `out` against tensors of the same dtype, bit by bit; NaN equals the same NaN."""
    assert out.dtype == expected.dtype
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.element_size()]
    same = out.contiguous().view(as_integers) == expected.contiguous().view(as_integers)
    if not bool(same.all()):
        wrong = int((~same).sum())
        raise AssertionError(
            f"{wrong} of {same.numel()} elements differ; {_worst(out, expected, offs)}"
        )


def assert_untouched(poisoned: Tensor) -> None:
    """Every element must still be the NaN it was filled with."""
    fresh = torch.full_like(poisoned, float("nan"))
    assert_same_bits(poisoned, fresh)


def _worst(out: Tensor, expected: Tensor, offs: Tensor | None) -> str:
    difference = (out.double() - expected.double()).abs().nan_to_num(nan=float("inf"))
    row, column = divmod(int(difference.argmax()), out.shape[1])
    place = f"worst at row {row}, column {column}"
    if offs is not None:
        group = int(torch.searchsorted(offs.cpu(), row, right=True))
        begin = int(offs[group - 1]) if group else 0
        place += f" (row {row - begin} of group {group}, which has {int(offs[group]) - begin})"
    wrong_rows = int((difference > 0).any(dim=1).sum())
    return (
        f"{place}: got {float(out[row, column])}, expected {float(expected[row, column])}; "
        f"{wrong_rows} of {out.shape[0]} rows differ"
    )
