"""Words that the checks of all ops use."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT_MAX = torch.finfo(torch.float32).max


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype as users write it after `torch.`."""
    return str(dtype).removeprefix("torch.")


def check_given(op: str, argument: str, tensor: Tensor | None) -> None:
    """Raise a ValueError for None, which torch takes for a tensor and knows no kernel for."""
    if tensor is None:
        raise ValueError(f"{op}: `{argument}` must be a tensor, got None")


def check_finite(op: str, argument: str, value: float) -> None:
    """Raise a ValueError for a number that float32 has not, a NaN among them."""
    if not abs(value) <= FLOAT_MAX:
        raise ValueError(f"{op}: `{argument}` must be finite in float32, got {value}")


def device_message(op: str, argument: str, tensor: Tensor, first: str, like: Tensor) -> str:
    """Say that `tensor` must be where `like`, the op's argument `first`, is."""
    return f"{op}: `{argument}` must be on {like.device}, where `{first}` is, got {tensor.device}"
