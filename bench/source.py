"""Calls as Python source, laid out as `ruff format` would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COLUMNS = 100
INDENT = 4


@dataclass(frozen=True)
class Call:
    """A call or, without a name, a tuple of at least two elements."""

    name: str
    arguments: Sequence[Call | str]

    def flat(self) -> str:
        """Return it in one line."""
        return f"{self.name}({', '.join(map(_flat, self.arguments))})"


def _flat(node: Call | str) -> str:
    return node if isinstance(node, str) else node.flat()


def lay_out(node: Call | str, *, before: str = "", after: str = "", indent: int = 0) -> str:
    """Return the source of an expression, in one line where it fits, else an argument a line."""
    margin = " " * indent
    flat = f"{margin}{before}{_flat(node)}{after}"
    if isinstance(node, str) or len(flat) <= COLUMNS:
        return flat
    inner = [lay_out(child, after=",", indent=indent + INDENT) for child in node.arguments]
    return "\n".join([f"{margin}{before}{node.name}(", *inner, f"{margin}){after}"])


def quoted(text: str) -> str:
    """Return a string literal in double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
