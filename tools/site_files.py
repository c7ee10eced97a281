"""Puts the repository's Markdown files on the site under their own paths, and what they link to.

A hook of MkDocs (mkdocs.yml). Pages lie in several folders, beside what they are about; on the site
each keeps its path, so relative links hold in both places, and MkDocs checks every one of them.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/**/*.md", "bench/**/*.md", "csrc/*/README.md", "examples/*.md")
# A list behind a line of text: Python-Markdown, unlike others, wants an empty line between.
LIST_BEHIND_TEXT = re.compile(r"^(?![-\s|>#<]|\d+\. |```)(.+)\n(?=- |1\. )", re.MULTILINE)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)")
LINK_TO_SCRIPT = re.compile(r"(\]\([^)#\s:]+)\.py\)")


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
        name = path.relative_to(ROOT)
        if path.suffix == ".py":
            files.append(script_page(path, name.with_suffix(".md").as_posix(), config))
        else:
            uri = name.as_posix()
            files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def script_page(path: Path, uri: str, config: MkDocsConfig) -> File:
    """A page that shows a script: a browser would download the file itself."""
    content = f"# {path.name}\n\n```python\n{path.read_text()}```\n"
    return File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Outside code, put empty lines before lists, and link to the pages of scripts."""
    parts = FENCED.split(markdown)
    for index in range(0, len(parts), 2):
        text = LIST_BEHIND_TEXT.sub(r"\1\n\n", parts[index])
        parts[index] = LINK_TO_SCRIPT.sub(r"\1.md)", text)
    return "".join(parts)
