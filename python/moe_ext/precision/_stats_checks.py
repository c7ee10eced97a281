"""Statistics from a file: each part is of its kind, and in the range that calibration can give."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moe_ext._fused_moe_workspace import MAX_EXPERTS
from moe_ext._words import name_of
from moe_ext.nn._arguments import is_int, shown
from moe_ext.nn._pieces import LAYOUTS, quoted
from moe_ext.precision.stats import NUMBERS, SHAPES

_COUNTS = {"hidden_size": 1, "intermediate_size": 1, "num_tokens": 0, "min_rows": 1}
"""Whole numbers, with the least that each may be."""
_BOOLS = ("gated", "halves")
_LAYOUTS = ("gate_up_scales", "down_scales")
_MAY_BE_NONE = ("model_signal", "model_noise")  # as all others: not negative, finite


def check_layer_stats(
    op: str, where: str, numbers: Any, tensors: Mapping[str, Tensor | None]
) -> None:
    """Raise a ValueError for the first part of a layer's statistics that is none.

    Args:
        op: what reads them.
        where: the layer, in messages.
        numbers: what should be an object with `NUMBERS`.
        tensors: by the names of `SHAPES`; None where there is none.
    """
    if not isinstance(numbers, dict) or set(numbers) != set(NUMBERS):
        got = ", ".join(numbers) or "nothing" if isinstance(numbers, dict) else shown(numbers)
        raise ValueError(f"{op}: `{where}` must have {', '.join(NUMBERS)}, got {got}")
    for name, value in numbers.items():
        wanted = _wanted(name, value)
        if wanted is not None:
            raise ValueError(f"{op}: `{where}.{name}` must be {wanted}, got {shown(value)}")
    rows = tensors["rows"]
    count = 0 if rows is None or not rows.dim() else rows.shape[0]
    for name, (rest, dtype) in SHAPES.items():
        tensor, shape = tensors[name], (count, *rest)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype is not dtype:
            raise ValueError(
                f"{op}: `{where}.{name}` must be {name_of(dtype)} of shape {shape}, got "
                f"{_got(tensor)}"
            )
        wrong = ~((tensor >= 0) & tensor.isfinite())
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(
                f"{op}: `{where}.{name}` must be finite and not negative, got "
                f"{tensor[place].item()} at {place}"
            )
    if not 1 <= count <= MAX_EXPERTS:
        raise ValueError(f"{op}: `{where}` must have 1 to {MAX_EXPERTS} experts, got {count}")


def _wanted(name: str, value: Any) -> str | None:
    """Return what a number must be, None where it is."""
    if name in _COUNTS:
        least = _COUNTS[name]
        right = is_int(value) and value >= least
        return None if right else f"an int of at least {least}"
    if name in _BOOLS:
        return None if isinstance(value, bool) else "True or False"
    if name in _LAYOUTS:
        right = isinstance(value, str) and value in LAYOUTS
        return None if right else f"one of {', '.join(map(quoted, LAYOUTS))}"
    if value is None and name in _MAY_BE_NONE:
        return None
    is_number = is_int(value) or isinstance(value, float)
    right = is_number and 0 <= value < math.inf
    return None if right else "a finite number, not negative"


def _got(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    return f"{name_of(tensor.dtype)} of shape {tuple(tensor.shape)}"
