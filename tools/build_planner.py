"""Compiles moe_ext._planner for this interpreter without network, pip or CMake (`make OFFLINE=1`).

pybind11's headers come from the pybind11 package, or from torch, which ships a copy. A planner that
is newer than its sources is left alone.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

from progress import run

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "moe_ext"


def pybind11_include() -> Path:
    """Directory that holds pybind11/pybind11.h."""
    for package in ("pybind11", "torch"):
        spec = importlib.util.find_spec(package)
        for directory in (spec.submodule_search_locations or []) if spec else []:
            if Path(directory, "include/pybind11/pybind11.h").is_file():
                return Path(directory, "include")
    sys.exit(f"build_planner: {sys.executable} has neither pybind11 nor torch: no pybind11 headers")


def main() -> None:
    """Build the planner if it is missing or older than what it is made from."""
    target = PACKAGE / f"_planner{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = [
        path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".hpp", ".def")
    ]
    newest = max(path.stat().st_mtime for path in sources)
    if target.is_file() and target.stat().st_mtime >= newest:
        return
    python_include = sysconfig.get_path("include")
    if not Path(python_include, "Python.h").is_file():
        sys.exit(
            f"build_planner: no Python.h in {python_include} (Debian: apt install python3-dev)"
        )
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-s"]
    includes = [
        f"-I{ROOT / 'csrc'}",
        "-isystem",
        str(pybind11_include()),
        "-isystem",
        python_include,
    ]
    source = ROOT / "csrc/planner/planner.cpp"
    compiler = os.environ.get("CXX", "c++")
    run("compiling moe_ext._planner", [compiler, *flags, *includes, str(source), "-o", str(target)])


if __name__ == "__main__":
    main()
