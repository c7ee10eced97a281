"""Makes .venv ready for a `make` target: torch, the package in editable mode, the target's extras.

    python3 tools/environment.py --torch torch==2.13.0 --extras test --cuda off

Does nothing when .venv already is what is asked for. Builds without isolation, so that CMake
rebuilds only what changed; the build requirements are those of pyproject.toml and setup.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from progress import run

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "moe_ext.json"

# Runs inside .venv: pip vendors a TOML reader for Pythons older than 3.11.
READ_BUILD_REQUIREMENTS = """
try:
    import tomllib
except ModuleNotFoundError:
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    print("\\n".join(tomllib.load(file)["build-system"]["requires"]))
"""
READ_EXTRA_REQUIREMENTS = """
import contextlib, io
from setuptools import build_meta
with contextlib.redirect_stdout(io.StringIO()):
    extra = build_meta.get_requires_for_build_editable()
print("\\n".join(extra))
"""


def source_hash() -> str:
    """Hash of everything that the editable installation was built from."""
    digest = hashlib.sha256()
    paths = [ROOT / name for name in ("setup.py", "pyproject.toml", "CMakeLists.txt")]
    for directory in ("cmake", "csrc"):
        paths.extend(path for path in sorted((ROOT / directory).rglob("*")) if path.is_file())
    for path in paths:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def read_stamp() -> dict[str, object]:
    """What .venv was made ready for, or nothing."""
    return json.loads(STAMP.read_text()) if STAMP.is_file() and PYTHON.is_file() else {}


def pip_install(*arguments: str, env: dict[str, str] | None = None, verbose: bool = False) -> None:
    """Run pip with its own progress bars; `verbose` shows the build's progress instead."""
    print("pip install", *arguments, file=sys.stderr, flush=True)
    loudness = ["--verbose"] if verbose else [] if sys.stderr.isatty() else ["--quiet"]
    command = [
        str(PYTHON),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        *loudness,
        *arguments,
    ]
    subprocess.run(command, cwd=ROOT, env=env, check=True)


def evaluate(code: str, env: dict[str, str]) -> list[str]:
    """Lines that `code` prints under .venv's interpreter."""
    result = subprocess.run(
        [str(PYTHON), "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    return result.stdout.split("\n")[:-1] if result.stdout.strip() else []


def main() -> None:
    """Bring .venv up to date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch", default="torch", help="requirement of torch, for example torch==2.13.0"
    )
    parser.add_argument("--extras", default="", help="comma-separated extras of the package")
    parser.add_argument(
        "--cuda",
        default="auto",
        choices=("auto", "on", "off", "prebuilt"),
        help="MOE_EXT_BUILD_CUDA",
    )
    arguments = parser.parse_args()
    # Unlike the package, this script may meet an older interpreter.
    if sys.version_info < (3, 10):  # noqa: UP036
        version = sys.version.split()[0]
        sys.exit(f"moe_ext needs Python >= 3.10, got {version} ({sys.executable}): make PYTHON=...")

    old = read_stamp()
    # A bare "torch" is satisfied by whichever torch an earlier call chose.
    torch = str(old["torch"]) if old and arguments.torch == "torch" else arguments.torch
    extras = sorted({*arguments.extras.split(","), *old.get("extras", [])} - {""})
    new = {"torch": torch, "extras": extras, "cuda": arguments.cuda, "sources": source_hash()}
    if new == old:
        return
    STAMP.unlink(missing_ok=True)
    if not PYTHON.is_file():
        run("creating .venv", [sys.executable, "-m", "venv", "--clear", str(VENV)])
    env = {**os.environ, "MOE_EXT_BUILD_CUDA": arguments.cuda}
    if torch != old.get("torch"):
        pip_install(torch, env=env)
    pip_install(*evaluate(READ_BUILD_REQUIREMENTS, env))
    # CUTLASS's package pulls in a dozen others for its Python side; only its headers are used.
    extra = evaluate(READ_EXTRA_REQUIREMENTS, env)
    if extra:
        pip_install("--no-deps", "--no-warn-conflicts", *extra)
    package = f".[{','.join(extras)}]" if extras else "."
    options = ("--no-build-isolation", "--no-warn-conflicts")
    pip_install(*options, "-e", package, env=env, verbose=bool(extra))
    STAMP.write_text(json.dumps(new))


if __name__ == "__main__":
    main()
