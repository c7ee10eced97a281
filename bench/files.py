"""Files that commands read: one that is not what it has to be is refused in a line."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_NO_ROW = (AttributeError, KeyError, TypeError, ValueError, RecursionError)
"""Errors of a line that is no JSON, or has other columns."""

SHOWN = 60
"""Characters of a line that a message repeats."""


class FileError(ValueError):
    """A file is not what a command reads; the message begins with its path."""


@contextlib.contextmanager
def refused_in_a_line(parser: argparse.ArgumentParser) -> Iterator[None]:
    """End a command with a FileError's message and exit code 2, as argparse does for arguments."""
    try:
        yield
    except FileError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def text_of(path: Path) -> str:
    """Return what a file holds."""
    try:
        return path.read_text()
    except UnicodeDecodeError:
        raise FileError(f"{path} must hold text, got bytes that are none") from None
    except OSError as error:
        raise FileError(f"{path} must be a file to read, got: {error.strerror}") from None


def read_rows(path: Path, parse: Callable[[dict[str, Any]], T], rows: str) -> list[T]:
    """Read a JSONL file, at least one row; `rows` says what they are and who writes them."""
    parsed = []
    for number, line in enumerate(text_of(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            parsed.append(parse(json.loads(line)))
        except _NO_ROW:
            shown = line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
            raise FileError(f"{path} must hold {rows}, got {shown!r} in line {number}") from None
    if not parsed:
        raise FileError(f"{path} must hold {rows}, got none")
    return parsed
