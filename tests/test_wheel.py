"""Wheels: what they hold, that they run by themselves, and that only the planner is of a Python."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import moe_ext
import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "python/moe_ext/moe_ext_cuda.so"
PACKED = "moe_ext/moe_ext_cuda.so"
OLDEST, NEWEST = 10, 15
PATH = "/usr/local/bin:/usr/bin:/bin"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the sources with a CUDA library: the built one, or a stand-in with its names."""
    for package in ("pip", "pybind11", "cmake"):
        try:
            # Not importorskip: the repository's directory cmake/ imports under that name, and
            # setuptools cannot be imported behind pip.
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"needs the Python package {package}")
    copy = tmp_path_factory.mktemp("wheel") / "tree"
    ignore = shutil.ignore_patterns(".git", ".venv", "build", "*.so", "*.egg-info", "results")
    shutil.copytree(ROOT, copy, ignore=ignore)
    library = copy / "python" / PACKED
    if LIBRARY.is_file():
        shutil.copy2(LIBRARY, library)
    else:
        library.write_text(" ".join(config.id for config in moe_ext.kernels()))
    return copy


def build(tree, python, **environment):
    """Make a wheel of the tree for a Python; its path."""
    command = [python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    environment = {"MOE_EXT_BUILD_CUDA": "prebuilt", "PATH": PATH, **environment}
    out = tree.parent / Path(python).name
    subprocess.run([*command, "-w", str(out), str(tree)], env=environment, check=True)
    (wheel,) = out.glob("moe_ext-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tree):
    return build(tree, sys.executable)


def test_a_wheel_holds_the_package_and_the_licences_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    root = ROOT / "python"
    sources = {str(path.relative_to(root)) for path in (root / "moe_ext").rglob("*.py*")}
    sources = {path for path in sources if "__pycache__" not in path}
    sources |= {"moe_ext/py.typed", PACKED}
    planner = [name for name in names if re.fullmatch(r"moe_ext/_planner\.cpython.*\.so", name)]
    metadata = [name for name in names if ".dist-info/" in name]
    assert sorted([*sources, *planner, *metadata]) == sorted(names)
    assert len(planner) == 1
    assert {Path(name).name for name in metadata if "/licenses/" in name} == {
        "LICENSE",
        "THIRD_PARTY_LICENSES",
    }


def test_a_wheel_runs_where_no_compiler_and_no_source_is(wheel, tree):
    pytest.importorskip("typer")
    library = str(tree / "python" / PACKED)
    tool = str(ROOT / "tools/check_wheel.py")
    command = [sys.executable, tool, str(wheel.parent), "--library", library]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "runs in an environment of its own" in result.stdout


def test_a_wheel_with_another_library_is_refused(wheel, tmp_path):
    other = tmp_path / "moe_ext_cuda.so"
    other.write_text("another build")
    tool = str(ROOT / "tools/check_wheel.py")
    command = [sys.executable, tool, str(wheel.parent), "--library", str(other)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"must hold {other} byte for byte, got another file" in result.stderr


def other_pythons():
    """Pythons of this machine, other than this one, that pip and a compiler can make wheels for."""
    ask = (
        "import pip, sys, sysconfig, pathlib; print(sys.executable); "
        "assert pathlib.Path(sysconfig.get_path('include'), 'Python.h').is_file()"
    )
    found = []
    for minor in range(OLDEST, NEWEST + 1):
        program = shutil.which(f"python3.{minor}")
        if program is not None and minor != sys.version_info.minor:
            command = [program, "-c", ask]
            asked = subprocess.run(command, capture_output=True, text=True, check=False)
            found += [asked.stdout.strip()] if asked.returncode == 0 else []
    return found


def members(wheel):
    """What a wheel holds, but for its metadata, which names the Python."""
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist() if ".dist-info/" not in name}


def test_wheels_of_other_pythons_differ_in_the_planner_alone(wheel, tree):
    ours = members(wheel)
    assert ours[PACKED] == (tree / "python" / PACKED).read_bytes()
    tagged = {name for name in ours if "cpython" in name}
    assert tagged == {name for name in ours if "_planner." in name and name.endswith(".so")}
    # The build tools are this Python's: what they need of it is pure Python, or a program.
    packages = os.pathsep.join(entry for entry in sys.path if entry.endswith("site-packages"))
    for python in other_pythons()[:1]:  # each compiles a planner
        theirs = members(build(tree, python, PYTHONPATH=packages))
        shared = ours.keys() - tagged
        assert len(theirs) == len(ours)
        assert {name: theirs[name] for name in shared} == {name: ours[name] for name in shared}
