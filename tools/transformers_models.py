"""Writes which models of the installed Transformers run on moe_ext into docs/transformers.md.

    PYTHONPATH=python:tests python tools/transformers_models.py

Makes a tiny random model of each class of experts that uses Transformers' registry, and compares
its logits with those of eager, as tests/test_transformers_models.py does. A minute on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path

import transformers
from support.tiny_models import MODEL_CLASSES, Closeness, ModelClass, closeness

PAGE = Path(__file__).resolve().parent.parent / "docs" / "transformers.md"
BEGIN, END = "<!-- models:begin -->", "<!-- models:end -->"


def measured(made: ModelClass) -> Closeness | None:
    """Run a model; None where it raises."""
    try:
        return closeness(made, "cpu")
    except Exception as error:  # whatever a model raises is what the page has to say
        print(f"{made}: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def section() -> str:
    """Return what stands between the marks."""
    results = {made: measured(made) for made in MODEL_CLASSES}
    ratios = [result.ours / result.eager for result in results.values() if result is not None]
    closer = sum(ratio <= 1 for ratio in ratios)
    lines = [
        f"Transformers {transformers.__version__} has {len(MODEL_CLASSES)} classes of experts "
        f"that use its registry. With {closer} of them logits by moe_ext are closer to float32 "
        f"than those of eager; the farthest are {max(ratios):.1f} times as far.",
        "",
        "| package | experts | passed |",
        "|---|---|---|",
    ]
    for made, result in results.items():
        passed = "yes" if result is not None and result.passes else "no"
        lines.append(f"| `{made.package}` | `{made.experts}` | {passed} |")
    return "\n".join(lines)


def main() -> None:
    """Replace the section."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{section()}\n{END}{after}")


if __name__ == "__main__":
    main()
