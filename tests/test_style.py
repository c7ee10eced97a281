"""No source file grows past 500 lines or a line past 120 columns."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DIRECTORIES = ("python", "csrc", "tests", "bench", "examples", "tools", "cmake")
SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".cuh", ".cu", ".def", ".in", ".cmake", ".sh"}
SOURCES = sorted(
    path.relative_to(ROOT)
    for directory in DIRECTORIES
    for path in (ROOT / directory).rglob("*")
    if path.suffix in SUFFIXES
)
# Tables: one row a line, as long as there are rows.
NO_LINE_LIMIT = {"_dispatch_table.py"}


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_size(path):
    lines = (ROOT / path).read_text().splitlines()
    if path.name not in NO_LINE_LIMIT:
        assert len(lines) <= 500
    too_wide = [number for number, line in enumerate(lines, start=1) if len(line) > 120]
    assert too_wide == []
