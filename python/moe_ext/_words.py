"""Words that the checks of all ops use."""

from __future__ import annotations

import torch
from torch import Tensor


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype as users write it after `torch.`."""
    return str(dtype).removeprefix("torch.")


def device_message(op: str, argument: str, tensor: Tensor, first: str, like: Tensor) -> str:
    """Say that `tensor` must be where `like`, the op's argument `first`, is."""
    return f"{op}: `{argument}` must be on {like.device}, where `{first}` is, got {tensor.device}"
