"""Checks a wheel: installs it where nothing but its requirements is, and runs it there.

    python tools/check_wheel.py dist --library python/moe_ext/moe_ext_cuda.so

The requirements are those that this Python has, linked file by file: nothing is fetched, and no
compiler, no build tool and nothing of the source tree can be seen from there. No GPU is needed, and
one that is there is hidden.
"""

from __future__ import annotations

import argparse
import email
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

# pip is in every environment that builds, `packaging` need not be.
from pip._vendor.packaging.requirements import Requirement

EXTRA = "cli"
LIBRARY = "moe_ext/moe_ext_cuda.so"
SMOKE = Path(__file__).resolve().parent / "wheel_smoke.py"


def own_wheel(directory: Path) -> Path:
    """The newest wheel for this Python."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    found = sorted(directory.glob(f"moe_ext-*-{tag}-*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        sys.exit(f"check_wheel: {directory} must hold a wheel of moe_ext for {tag}, got none")
    return found[-1]


def requirements_of(wheel: Path) -> list[Requirement]:
    """What the wheel wants installed, with the command line."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(file.read(name))
    return list(wanted(metadata.get_all("Requires-Dist") or [], {EXTRA}))


def wanted(texts: list[str], extras: set[str]) -> Iterator[Requirement]:
    """The requirements that hold on this machine."""
    for requirement in map(Requirement, texts):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            yield requirement


def closure(requirements: list[Requirement]) -> list[importlib.metadata.Distribution]:
    """The installed distributions of requirements, and of theirs."""
    found: dict[str, importlib.metadata.Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    left = list(requirements)
    while left:
        requirement = left.pop()
        key = (requirement.name.lower(), frozenset(requirement.extras))
        if key not in seen:
            seen.add(key)
            found[key[0]] = importlib.metadata.distribution(requirement.name)
            left += wanted(found[key[0]].requires or [], set(requirement.extras))
    return list(found.values())


def link(distribution: importlib.metadata.Distribution, site: Path) -> None:
    """Make an installed distribution another environment's too, but for its scripts."""
    for file in distribution.files or []:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(Path(str(file.locate())).resolve())


def make_environment(directory: Path, wheel: Path) -> Path:
    """An environment with the wheel and what it requires; returns its directory of programs."""
    venv.create(directory, with_pip=False)
    programs = directory / "bin"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = directory / "lib" / version / "site-packages"
    for distribution in closure(requirements_of(wheel)):
        link(distribution, site)
    command = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install"]
    command += ["--quiet", "--disable-pip-version-check", "--no-index", f"{wheel}[{EXTRA}]"]
    # What PYTHONPATH names would be as good as installed to pip.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, env=environment, check=True)
    return programs


def run(programs: Path, *command: str) -> None:
    """Run a program of the environment, which sees no other one and no GPU."""
    environment = {"PATH": str(programs), "CUDA_VISIBLE_DEVICES": "", "HOME": str(programs.parent)}
    environment |= {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    subprocess.run(
        [str(programs / command[0]), *command[1:]], cwd=programs, env=environment, check=True
    )


def check(wheel: Path, library: Path | None) -> None:
    """Fail unless the wheel works by itself and holds the library as it was built."""
    with zipfile.ZipFile(wheel) as file:
        packed = file.read(LIBRARY) if LIBRARY in file.namelist() else None
    if None not in (library, packed) and packed != library.read_bytes():
        sys.exit(f"check_wheel: {wheel.name} must hold {library} byte for byte, got another file")
    with tempfile.TemporaryDirectory() as directory:
        programs = make_environment(Path(directory).resolve(), wheel)
        run(programs, "python", "-I", "-W", "ignore", str(SMOKE), str(int(packed is not None)))
        run(programs, "moe-ext", "doctor")


def main() -> None:
    """Check the wheel of this Python."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where wheels are")
    parser.add_argument("--library", type=Path, help="what the CUDA library inside must equal")
    arguments = parser.parse_args()
    wheel = own_wheel(arguments.directory)
    check(wheel, arguments.library)
    print(f"check_wheel: {wheel} runs in an environment of its own")


if __name__ == "__main__":
    main()
