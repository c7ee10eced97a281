"""What is shipped: the version, what the CUDA library links against, and how a build fails."""

import importlib.util
import re
import shutil
import subprocess
import sys
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


def test_build_names_the_modes_that_there_are(setup_script, monkeypatch):
    monkeypatch.setenv("MOE_EXT_BUILD_CUDA", "yes")
    with pytest.raises(SystemExit) as failure:
        setup_script.build_mode()
    assert str(failure.value) == (
        "moe_ext: MOE_EXT_BUILD_CUDA must be one of auto, on, off, prebuilt, got 'yes'"
    )


def test_build_refuses_a_prebuilt_library_of_another_build(setup_script, monkeypatch, tmp_path):
    library = tmp_path / "moe_ext_cuda.so"
    monkeypatch.setattr(setup_script, "PREBUILT", library)
    with pytest.raises(SystemExit, match=r"=prebuilt needs .*moe_ext_cuda.so, got no such file"):
        setup_script.check_prebuilt()
    ids = [config.id for config in moe_ext.kernels()]
    library.write_text(" ".join(ids))
    setup_script.check_prebuilt()
    library.write_text(" ".join(own for own in ids if not own.startswith(ids[-1])))
    with pytest.raises(SystemExit) as failure:
        setup_script.check_prebuilt()
    assert str(failure.value).endswith(
        f"got a library of another build, without {ids[-1]}: build it again"
    )


def test_version_is_the_one_in_version_file():
    text = (ROOT / "python/moe_ext/_version.py").read_text()
    assert f'__version__ = "{moe_ext.__version__}"' in text


def test_changelog_names_the_version():
    assert f"## {moe_ext.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_shipped_sources_compile_nothing_and_stay_short():
    command = [sys.executable, str(ROOT / "tools/check_sources.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
