"""What calls on CPU tensors say once: they run the reference."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import torch


def _root_module(variables: dict[str, Any]) -> str:
    return str(variables.get("__name__", "")).partition(".")[0]


@functools.cache
def warn_of_cpu() -> None:
    """Warn, at the first call in a process without a GPU, with the caller's line."""
    if torch.cuda.is_available():
        return
    # The caller's line, whichever way the call came through this package and torch.
    level, frame = 1, sys._getframe()
    while frame.f_back and _root_module(frame.f_globals) in ("moe_ext", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        "moe_ext: no CUDA device here, so its ops run the float32 reference on the CPU: right, but "
        "slow",
        stacklevel=level,
    )
