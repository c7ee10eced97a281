"""Numbers and kernels of a command line: those that make no sense are refused before any work."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable


def whole(least: int) -> Callable[[str], int]:
    """Return a parser of a whole number that is at least `least`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {least}, got {text!r}"
            )
        return number

    return parse


def wholes(least: int) -> Callable[[str], list[int]]:
    """Return a parser of whole numbers with commas between them, each at least `least`."""
    parse_one = whole(least)

    def parse(text: str) -> list[int]:
        return [parse_one(word) for word in text.split(",")]

    return parse


def kernels(text: str) -> list[str]:
    """Parse ids of compiled kernels with commas between them, or "all"; any, without moe_ext."""
    words = [word for word in text.split(",") if word]
    if importlib.util.find_spec("moe_ext") is None:
        return words
    from moe_ext._configs import config_indices

    unknown = [word for word in words if word != "all" and word not in config_indices()]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"must be all or ids of compiled kernels, got {','.join(unknown)}"
        )
    return words
