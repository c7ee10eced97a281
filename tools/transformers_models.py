"""Writes which models of the installed Transformers run on moe_ext into docs/transformers.md.

    PYTHONPATH=python:tests python tools/transformers_models.py

Makes a tiny random model of each class of experts that uses Transformers' registry, and compares
its logits with those of eager, as tests/test_transformers_models.py does. A minute on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path

import transformers
from support.tiny_models import MODEL_CLASSES, ModelClass, closeness

PAGE = Path(__file__).resolve().parent.parent / "docs" / "transformers.md"
BEGIN, END = "<!-- models:begin -->", "<!-- models:end -->"


def verdict(made: ModelClass) -> str:
    """Return the last cell of a row."""
    try:
        return "yes" if closeness(made, "cpu").passes else "no"
    except Exception as error:  # whatever a model raises is what the page has to say
        print(f"{made}: {type(error).__name__}: {error}", file=sys.stderr)
        return "no"


def section() -> str:
    """Return what stands between the marks."""
    lines = [
        f"Transformers {transformers.__version__} has {len(MODEL_CLASSES)} classes of experts "
        "that use its registry.",
        "",
        "| package | experts | as close to float32 as eager |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{made.package}` | `{made.experts}` | {verdict(made)} |" for made in MODEL_CLASSES
    ]
    return "\n".join(lines)


def main() -> None:
    """Replace the section."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{section()}\n{END}{after}")


if __name__ == "__main__":
    main()
