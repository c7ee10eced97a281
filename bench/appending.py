"""JSONL files that grow over several runs, any of which may have been cut off."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

from bench.files import FileError


def check_appendable(path: Path) -> None:
    """Raise a FileError unless a file can be appended to or made; it is not made here."""
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        got = "a folder" if path.is_dir() else "one that cannot be written"
        got = got if path.parent.is_dir() else f"no folder {path.parent}"
        raise FileError(f"{path} must be a file to append rows to, got {got}")


def open_to_append(path: Path) -> TextIO:
    """Open a file behind its last whole line: what a run did not live to end is dropped."""
    if path.exists():
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            path.write_bytes(whole)
    return path.open("a")
