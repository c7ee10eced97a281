"""JSONL files that grow over several runs, any of which may have been cut off."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO


def open_to_append(path: Path) -> TextIO:
    """Open a file behind its last whole line: what a run did not live to end is dropped."""
    if path.exists():
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            path.write_bytes(whole)
    return path.open("a")
