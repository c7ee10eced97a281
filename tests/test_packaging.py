"""What is shipped: the wheel's content, the version, and what the CUDA library links against."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import moe_ext
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "python/moe_ext/moe_ext_cuda.so"

needs_library = pytest.mark.skipif(
    not LIBRARY.is_file() or shutil.which("nm") is None or shutil.which("readelf") is None,
    reason="needs a built moe_ext_cuda.so and binutils",
)
needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None or shutil.which("nm") is None or shutil.which("readelf") is None,
    reason="needs a C++ compiler and binutils",
)


def check_linkage(library: Path) -> "subprocess.CompletedProcess[str]":
    """Run the linkage audit on `library`."""
    tool = ROOT / "tools/check_binary.py"
    command = [sys.executable, str(tool), "--linkage-only", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def compile_library(source: str, directory: Path) -> Path:
    """Compile `source` to a shared library with unresolved symbols."""
    library = directory / "probe.so"
    command = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    return library


@needs_library
def test_library_links_against_the_stable_abi_of_torch_2_10_alone():
    result = check_linkage(LIBRARY)
    assert result.returncode == 0, result.stderr


@needs_compiler
@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        ("torch_library_set_python_module", r"came with torch \(2, 13\)"),
        ("_ZN3c105ErrorC1ENS_14SourceLocationE", "not part of LibTorch's stable ABI"),
        ("PyObject_Call", "Python symbol PyObject_Call"),
    ],
)
def test_audit_reports_a_symbol_that_torch_2_10_lacks(tmp_path, symbol, message):
    if symbol == "torch_library_set_python_module" and torch.__version__ < (2, 13):
        pytest.skip(f"torch {torch.__version__} does not have the symbol either")
    source = f'extern "C" void {symbol}(); extern "C" void probe() {{ {symbol}(); }}'
    result = check_linkage(compile_library(source, tmp_path))
    assert result.returncode == 1
    assert re.search(message, result.stderr)


@needs_compiler
def test_audit_accepts_a_symbol_that_torch_2_10_has(tmp_path):
    symbol = "torch_get_mutable_data_ptr"
    source = f'extern "C" void {symbol}(); extern "C" void probe() {{ {symbol}(); }}'
    result = check_linkage(compile_library(source, tmp_path))
    assert symbol not in result.stderr


@needs_compiler
def test_audit_reports_paths_of_the_build_machine(tmp_path):
    source = 'extern "C" const char* probe() { return "/opt/x/site-packages/torch/library.h"; }'
    result = check_linkage(compile_library(source, tmp_path))
    assert "holds the path /opt/x/site-packages/torch/library.h" in result.stderr


@pytest.fixture
def setup_script(monkeypatch) -> ModuleType:
    """setup.py as a module, with `setup` itself left out."""
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("MOE_EXT_BUILD_CUDA", "off")
    spec = importlib.util.spec_from_file_location("moe_ext_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_program(directory: Path, name: str, version: str) -> Path:
    """A program that prints its version."""
    program = directory / name
    program.write_text(f"#!/bin/sh\necho {name} version {version}\n")
    program.chmod(0o755)
    return program


def test_build_names_a_cmake_that_is_too_old(setup_script, monkeypatch, tmp_path):
    program = make_program(tmp_path, "cmake", "3.25.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    # What the repository's own directory cmake/ imports as.
    monkeypatch.setitem(sys.modules, "cmake", ModuleType("cmake"))
    monkeypatch.setattr(setup_script.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(SystemExit) as failure:
        setup_script.find_program("cmake", "CMAKE_BIN_DIR", setup_script.MIN_CMAKE)
    assert str(failure.value) == (
        f"moe_ext: cmake>=3.31 is needed, {program} is 3.25.1: pip install 'cmake>=3.31'"
    )
    make_program(tmp_path, "cmake", "3.31.0")
    found = setup_script.find_program("cmake", "CMAKE_BIN_DIR", setup_script.MIN_CMAKE)
    assert found == str(program)


def test_build_without_pybind11_says_what_to_install(setup_script, monkeypatch):
    monkeypatch.setattr(setup_script, "find_in_packages", lambda relative: None)
    with pytest.raises(SystemExit) as failure:
        setup_script.cmake_options(cuda=False)
    assert str(failure.value) == ("moe_ext: no pybind11 was found: pip install 'pybind11>=2.13'")


def test_version_is_the_one_in_version_file():
    text = (ROOT / "python/moe_ext/_version.py").read_text()
    assert f'__version__ = "{moe_ext.__version__}"' in text


def test_changelog_names_the_version():
    assert f"## {moe_ext.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_shipped_sources_compile_nothing_and_stay_short():
    command = [sys.executable, str(ROOT / "tools/check_sources.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_wheel_holds_the_package_and_the_licences_alone(tmp_path):
    pytest.importorskip("pip")
    pytest.importorskip("pybind11")
    try:
        # Not importorskip: this repository's directory cmake/ imports under that name.
        importlib.metadata.distribution("cmake")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the Python package cmake")
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns(".git", ".venv", "build", "*.so", "*.egg-info", "results")
    shutil.copytree(ROOT, tree, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    environment = {"MOE_EXT_BUILD_CUDA": "off", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    subprocess.run([*command, "-w", str(tmp_path), str(tree)], env=environment, check=True)
    (wheel,) = tmp_path.glob("moe_ext-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    root = ROOT / "python"
    sources = {str(path.relative_to(root)) for path in (root / "moe_ext").rglob("*.py*")}
    sources = {path for path in sources if "__pycache__" not in path}
    sources.add("moe_ext/py.typed")
    planner = [name for name in names if re.fullmatch(r"moe_ext/_planner\.cpython.*\.so", name)]
    metadata = [name for name in names if ".dist-info/" in name]
    assert sorted([*sources, *planner, *metadata]) == sorted(names)
    assert len(planner) == 1
    assert {Path(name).name for name in metadata if "/licenses/" in name} == {
        "LICENSE",
        "THIRD_PARTY_LICENSES",
    }
