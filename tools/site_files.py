"""Puts the repository's Markdown files on the site under their own paths, and what they link to.

A hook of MkDocs (mkdocs.yml). Pages lie in several folders, beside what they are about; on the site
each keeps its path, so relative links hold in both places, and MkDocs checks every one of them.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/**/*.md", "bench/**/*.md", "csrc/*/README.md", "examples/*.md")
# A list behind a line of text: Python-Markdown, unlike others, wants an empty line between.
LIST_BEHIND_TEXT = re.compile(r"^(?![-\s|>#<]|\d+\. |```)(.+)\n(?=- |1\. )", re.MULTILINE)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)")


def pages() -> list[Path]:
    """Every page of the site."""
    return sorted(path for pattern in PAGES for path in ROOT.glob(pattern))


def linked_files(page: Path) -> set[Path]:
    """Files that a page links to and that are no pages: sources, rows, pictures."""
    targets = (page.parent / link for link in LINK.findall(page.read_text()) if ":" not in link)
    return {path.resolve() for path in targets if path.is_file() and path.suffix != ".md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace what lies in docs/ by the pages of the whole repository."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    own = pages()
    for path in [*own, *sorted({file for page in own for file in linked_files(page)})]:
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put empty lines before lists, outside code."""
    parts = FENCED.split(markdown)
    parts[::2] = [LIST_BEHIND_TEXT.sub(r"\1\n\n", text) for text in parts[::2]]
    return "".join(parts)
