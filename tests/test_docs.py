"""Documents: their code runs, their links lead somewhere, and the reference is complete."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import moe_ext
import moe_ext.compat
import moe_ext.nn
import moe_ext.precision
import moe_ext.reference
import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# As tools/site_files.py has them, which needs MkDocs.
PATTERNS = ("*.md", "docs/**/*.md", "bench/**/*.md", "csrc/*/README.md", "examples/*.md")
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))
# A comment in front of a block says why it is not run.
BLOCK = re.compile(r"(<!-- not run[^\n]*\n)?```python\n(.*?)```", re.DOTALL)
# `moe_ext.integrations` is left out: its one function needs Transformers to be imported.
MODULES = (
    *(moe_ext, moe_ext.nn, moe_ext.precision),
    *(moe_ext.compat, moe_ext.reference),
)


def names_of(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("name", ["quick-start.md", "layer.md"])
def test_code_runs(name):
    blocks = [code for skipped, code in BLOCK.findall((DOCS / name).read_text()) if not skipped]
    assert blocks
    exec(compile("\n".join(blocks), name, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=names_of(PAGES))
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    lost = [link for link in links if ":" not in link and not (page.parent / link).is_file()]
    assert lost == []


def test_every_page_has_its_place_on_the_site():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"(\S+\.md)$", text.split("\nnav:\n")[1], re.MULTILINE)
    assert sorted(listed) == sorted(names_of(PAGES))


def test_every_public_name_is_in_the_reference():
    shown = []
    for page in (DOCS / "reference").glob("*.md"):
        for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            module, _, name = path.rpartition(".")
            if module.startswith("moe_ext.integrations."):
                continue
            shown.append(getattr(importlib.import_module(module), name))
    public = [getattr(module, name) for module in MODULES for name in module.__all__]
    missing = [
        item for item in public if callable(item) and not any(item is other for other in shown)
    ]
    assert missing == []
    assert len({id(item) for item in shown}) == len(shown)


def test_lists_behind_text_are_lists_on_the_site(monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    turn = importlib.import_module("site_files").on_page_markdown
    assert turn("2 things:\n- a\n  more\n- b\n") == "2 things:\n\n- a\n  more\n- b\n"
    for kept in ("- a\n- b\n", "1. a\n   b\n2. c\n", "```\na\n- b\n```\n", "a\n\n- b\n"):
        assert turn(kept) == kept
