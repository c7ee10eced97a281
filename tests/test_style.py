"""No source file grows past 500 lines or a line past 120 columns."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("check_sources", ROOT / "tools/check_sources.py")
CHECK_SOURCES = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(CHECK_SOURCES)


def test_limits():
    assert (CHECK_SOURCES.MAX_LINES, CHECK_SOURCES.MAX_COLUMNS) == (500, 120)


@pytest.mark.parametrize(
    "path", CHECK_SOURCES.sized_sources(), ids=lambda path: str(path.relative_to(ROOT))
)
def test_size(path):
    assert CHECK_SOURCES.size_problems(path) == []
