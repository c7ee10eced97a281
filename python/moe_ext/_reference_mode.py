"""What surrounds references, so that they compute the same whatever a caller has switched on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Reference = TypeVar("_Reference", bound=Callable[..., Any])


def without_autocast(reference: _Reference) -> _Reference:
    """Run a reference, whose first argument is a tensor, with autocast off on its device.

    The dispatcher leaves autocast on below an op, where it would round operands of the reference.
    """

    @functools.wraps(reference)
    def run(*args: Any, **options: Any) -> Any:
        first = args[0] if args else next(iter(options.values()))
        if not torch.is_autocast_enabled(first.device.type):
            return reference(*args, **options)
        with torch.autocast(first.device.type, enabled=False):
            return reference(*args, **options)

    return cast(_Reference, run)
