"""Numbers of a command line: those that make no sense are refused in words, before any work."""

from __future__ import annotations

import argparse
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
