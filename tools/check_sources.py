"""Checks the sources: what ships compiles nothing and reads no environment, files stay short."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN_MODULES = {
    "triton",
    "subprocess",
    "torch.utils.cpp_extension",
    "cuda.bindings",
    "cupy",
    "numba",
}
FORBIDDEN_CALLS = {"system", "popen", "execv", "execvp", "spawnv", "getenv", "load_inline"}
FORBIDDEN_IN_CPP = re.compile(
    r"\b(nvrtc\w*|nvJitLink\w*|cuLinkCreate\w*|getenv|system|popen|fork|exec[lv]\w*)\s*\(|#include\s*<nvrtc"
)
MAX_LINES = 500
MAX_COLUMNS = 120
SIZED_DIRECTORIES = ("python", "csrc", "tests", "bench", "examples", "tools", "cmake")
SIZED_SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".cuh", ".cu", ".def", ".in", ".cmake", ".sh"}


def sized_sources() -> list[Path]:
    """Every source whose length is limited."""
    return sorted(
        path
        for directory in SIZED_DIRECTORIES
        for path in (ROOT / directory).rglob("*")
        if path.suffix in SIZED_SUFFIXES
    )


def size_problems(path: Path) -> list[str]:
    """Where a source is too long or too wide, as text to put behind its name."""
    lines = path.read_text().splitlines()
    problems = []
    if len(lines) > MAX_LINES:
        problems.append(f": {len(lines)} lines, the limit is {MAX_LINES}")
    problems += [
        f":{number}: {len(line)} columns, over {MAX_COLUMNS}"
        for number, line in enumerate(lines, 1)
        if len(line) > MAX_COLUMNS
    ]
    return problems


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Full names of all modules and names that a file imports, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def python_problems(path: Path) -> Iterator[str]:
    """Imports and calls that compile, start a program or read the environment."""
    tree = ast.parse(path.read_text())
    for module in imported_modules(tree):
        if any(module == name or module.startswith(f"{name}.") for name in FORBIDDEN_MODULES):
            yield f"imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_CALLS | {"environ"}:
            yield f"line {node.lineno}: uses {node.attr}"


def main() -> None:
    """Print every problem; fail if there is one."""
    problems: list[str] = []
    checked = 0
    for path in sorted((ROOT / "python/moe_ext").rglob("*.py")):
        checked += 1
        problems += [f"{path.relative_to(ROOT)}: {problem}" for problem in python_problems(path)]
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in (".cpp", ".hpp", ".cu", ".cuh", ".in"):
            checked += 1
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if found := FORBIDDEN_IN_CPP.search(line):
                    problems.append(f"{path.relative_to(ROOT)}:{number}: {found[0]}")
    for path in sized_sources():
        problems += [f"{path.relative_to(ROOT)}{problem}" for problem in size_problems(path)]
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    print(f"check_sources: {checked} shipped sources, {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
