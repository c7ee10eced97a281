"""Words that the checks of all ops use."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

FLOAT_MAX = torch.finfo(torch.float32).max
_KINDS = {
    "Tensor": "a tensor",
    "int": "a whole number of 64 bits",
    "int[]": "a sequence of whole numbers",
    "float": "a number",
    "bool": "True or False",
    "str": "a str",
    "ScalarType": "a torch.dtype",
}
"""Words for the types of torch's schema language that the ops' arguments have."""
_MAX_SHOWN = 40  # characters of a value; of a longer one, and of a tensor's, its type is said


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype as users write it after `torch.`."""
    return str(dtype).removeprefix("torch.")


def check_given(op: str, argument: str, tensor: Tensor | None) -> None:
    """Raise a ValueError for None, which torch takes for a tensor and knows no kernel for."""
    if tensor is None:
        raise ValueError(f"{op}: `{argument}` must be a tensor, got None")


def check_kinds(called: Any, error: RuntimeError) -> None:
    """Raise a ValueError for an error by which torch refuses an argument's kind, none for others.

    For where torch has raised, so that right calls pay nothing for it. Torch's own words hold the
    whole value, which may be a list of a million numbers.

    Args:
        called: the op.
        error: what torch has raised.
    """
    op = called._schema.name.partition("::")[2]
    found = re.match(
        rf"moe_ext::{op}\(\) Expected a value of type .*? for argument '(\w+)' but instead found "
        r"type '(.*?)'\.\nPosition: \d+\nValue: (.*)\nDeclaration: (.*)",
        str(error),
        re.DOTALL,
    )
    if found is None:
        return
    argument, got, value, declaration = found.groups()
    declared = re.search(rf"[(,] *(\w+(?:\[\])?)(?:\(\w!\))?(\??) {argument}\b", declaration)
    if declared is None or declared[1] not in _KINDS:
        return
    expected = _KINDS[declared[1]] + (" or None" if declared[2] else "")
    if declared[1] != "Tensor":
        got = _brief_text(value, got)
    raise ValueError(f"{op}: `{argument}` must be {expected}, got {got}") from None


def brief(value: object) -> str:
    """Return a value as a message shows it: of a long one its type."""
    return _brief_text(repr(value), type(value).__name__)


def _brief_text(text: str, kind: str) -> str:
    return text if len(text) <= _MAX_SHOWN and "\n" not in text else kind


def check_finite(op: str, argument: str, value: float) -> None:
    """Raise a ValueError for a number that float32 has not, a NaN among them."""
    if not abs(value) <= FLOAT_MAX:
        raise ValueError(f"{op}: `{argument}` must be finite in float32, got {value}")


def device_message(op: str, argument: str, tensor: Tensor, first: str, like: Tensor) -> str:
    """Say that `tensor` must be where `like`, the op's argument `first`, is."""
    return f"{op}: `{argument}` must be on {like.device}, where `{first}` is, got {tensor.device}"
