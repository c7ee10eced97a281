"""Builds the two binaries with CMake; everything else about the package is in pyproject.toml.

MOE_EXT_BUILD_CUDA is read here and nowhere else: `auto` (the default) builds the CUDA library where
nvcc 13 or a CUDA build of torch is installed, `on` always, `off` never; `prebuilt` packs the one in
python/moe_ext, so that wheels for several Pythons hold one file. What a build lacks is named to the
build front end as extra build requirements, so an isolated build fetches a compiler or torch only
where there is none.
"""

import importlib
import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARY = "moe_ext.moe_ext_cuda"
PREBUILT = ROOT / "python/moe_ext/moe_ext_cuda.so"
KERNELS = ROOT / "csrc/grouped_gemm/configs.def"
MODES = ("auto", "on", "off", "prebuilt")
MIN_CMAKE = (3, 31)
COMPILER_PACKAGES = (
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "nvidia-cuda-crt",
    "nvidia-cuda-cccl",
    "nvidia-cuda-runtime",
)
# What a CMake option points at, in words.
OPTION_SOURCES = {
    "PYBIND11_INCLUDE_DIR": "pybind11",
    "CUTLASS_INCLUDE_DIR": "CUTLASS",
    "MOE_EXT_TORCH_DIR": "torch >= 2.10",
    "CMAKE_CUDA_COMPILER": "nvcc >= 13",
}


def search_path() -> list[Path]:
    """Where packages may lie: this process's path, then the target that build isolation hides."""
    hidden = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        hidden.append(site.getusersitepackages())
    venv = Path(sys.prefix, "pyvenv.cfg")
    if venv.is_file() and re.search(
        r"(?m)^include-system-site-packages\s*=\s*true", venv.read_text()
    ):
        base = {"base": sys.base_prefix, "platbase": sys.base_prefix}
        hidden.append(sysconfig.get_path("purelib", vars=base))
    return [Path(entry) for entry in dict.fromkeys([*sys.path, *hidden]) if entry]


def find_in_packages(relative: str) -> Path | None:
    """First file or directory of that name below the search path."""
    return next((path for entry in search_path() if (path := entry / relative).exists()), None)


def find_torch() -> Path | None:
    """Directory of an installed torch >= 2.10, without importing it."""
    for entry in search_path():
        header = entry / "torch/include/torch/headeronly/version.h"
        if header.is_file():
            numbers = dict(
                re.findall(r"#define TORCH_VERSION_(MAJOR|MINOR)\s+(\d+)", header.read_text())
            )
            if (int(numbers["MAJOR"]), int(numbers["MINOR"])) >= (2, 10):
                return entry / "torch"
    return None


def find_nvcc() -> Path | None:
    """An nvcc of CUDA 13 or newer: CUDACXX, on PATH, in its usual place, or of PyPI's packages."""
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    for candidate in [*candidates, find_in_packages("nvidia/cu13/bin/nvcc")]:
        if candidate and Path(candidate).is_file():
            text = subprocess.run(
                [candidate, "--version"], capture_output=True, text=True, check=False
            ).stdout
            release = re.search(r"release (\d+)\.", text)
            if release and int(release[1]) >= 13:
                return Path(candidate)
    return None


def find_program(name: str, directory_attribute: str, minimum: tuple[int, ...] = ()) -> str:
    """A build tool: from its Python package where that is installed, else from PATH."""
    candidates = [shutil.which(name)]
    if importlib.util.find_spec(name) is not None:
        # Without the package, this repository's directory cmake/ imports under its name.
        directory = getattr(importlib.import_module(name), directory_attribute, None)
        if directory is not None:
            candidates.insert(0, shutil.which(name, path=directory))
    needed = ">=" + ".".join(map(str, minimum)) if minimum else ""
    found = []
    for program in candidates:
        if program is not None:
            version = program_version(program)
            if version >= minimum:
                return program
            found.append(f"{program} is {'.'.join(map(str, version)) or 'of unknown version'}")
    reason = f"{name}{needed} is needed, {', '.join(found)}" if found else f"no {name} was found"
    sys.exit(f"moe_ext: {reason}: pip install '{name}{needed}'")


def program_version(program: str) -> tuple[int, ...]:
    """The version that a build tool prints; () where it does not run."""
    result = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"\d+(\.\d+)+", result.stdout)
    return tuple(map(int, version[0].split("."))) if version else ()


def build_mode() -> str:
    """What MOE_EXT_BUILD_CUDA asks for."""
    mode = os.environ.get("MOE_EXT_BUILD_CUDA", "auto").lower()
    if mode not in MODES:
        sys.exit(f"moe_ext: MOE_EXT_BUILD_CUDA must be one of {', '.join(MODES)}, got {mode!r}")
    return mode


def check_prebuilt() -> None:
    """Fail unless a library is there that holds the kernels that the planner will list."""
    if not PREBUILT.is_file():
        sys.exit(f"moe_ext: MOE_EXT_BUILD_CUDA=prebuilt needs {PREBUILT}, got no such file")
    ids = re.findall(r"^MOE_EXT_CONFIG\(\s*(\w+)", KERNELS.read_text(), re.MULTILINE)
    data = PREBUILT.read_bytes()
    missing = [name for name in ids if name.encode() not in data]
    if missing:
        sys.exit(
            f"moe_ext: {PREBUILT} must hold the kernels of {KERNELS.name}, got a library of "
            f"another build, without {missing[0]}: build it again"
        )


def wants_cuda() -> bool:
    """Whether this build compiles the CUDA library."""
    mode = build_mode()
    if mode == "auto":
        torch = find_torch()
        return find_nvcc() is not None or (
            torch is not None and (torch / "lib/libtorch_cuda.so").exists()
        )
    return mode == "on"


def extra_build_requirements() -> list[str]:
    """What the CUDA library needs beyond pyproject.toml's requirements and what is installed."""
    if not wants_cuda():
        return []
    requirements = ["nvidia-cutlass==4.2.0.0"]
    if find_torch() is None:
        requirements.append("torch>=2.10")
    if find_nvcc() is None:
        requirements.extend(f"{package}==13.0.*" for package in COMPILER_PACKAGES)
    return requirements


def cmake_options(cuda: bool) -> dict[str, str]:
    """Where CMake finds what it needs; a build without isolation may lack some of it."""
    found = {"PYBIND11_INCLUDE_DIR": find_in_packages("pybind11/include")}
    if cuda:
        found["CUTLASS_INCLUDE_DIR"] = find_in_packages("cutlass_library/source/include")
        found["MOE_EXT_TORCH_DIR"] = find_torch()
        found["CMAKE_CUDA_COMPILER"] = find_nvcc()
    missing = [name for name, path in found.items() if path is None]
    if missing:
        requirements = extra_build_requirements() if cuda else []
        if "PYBIND11_INCLUDE_DIR" in missing:
            requirements.insert(0, "pybind11>=2.13")
        names = ", ".join(OPTION_SOURCES[name] for name in missing)
        command = " ".join(["pip install", *(f"'{name}'" for name in requirements)])
        without = ", or set MOE_EXT_BUILD_CUDA=off" if missing != ["PYBIND11_INCLUDE_DIR"] else ""
        sys.exit(f"moe_ext: no {names} was found: {command}{without}")
    options = {name: str(path) for name, path in found.items()}
    options["CMAKE_MAKE_PROGRAM"] = find_program("ninja", "BIN_DIR")
    options["Python_EXECUTABLE"] = sys.executable
    options["MOE_EXT_BUILD_CUDA"] = "ON" if cuda else "OFF"
    return options


class CMakeBuild(build_ext):
    """Builds both binaries in one CMake run and puts them where setuptools expects them."""

    def get_ext_filename(self, fullname: str) -> str:
        """The CUDA library has no Python symbols, hence no Python tag in its name."""
        if fullname in (LIBRARY, LIBRARY.rpartition(".")[2]):
            return fullname.replace(".", "/") + ".so"
        return super().get_ext_filename(fullname)

    def build_extensions(self) -> None:
        """Configure, build and copy; CMake and ninja print their own progress."""
        cuda = wants_cuda()
        kind = "cuda" if cuda else "cpu"
        directory = ROOT / "build" / f"cmake-{sysconfig.get_config_var('SOABI')}-{kind}"
        cmake = find_program("cmake", "CMAKE_BIN_DIR", MIN_CMAKE)
        options = cmake_options(cuda)
        # CMake forgets the other options when the compiler changes, as in every isolated build
        # that brings its own.
        cache = directory / "CMakeCache.txt"
        compiler = f"={options['CMAKE_CUDA_COMPILER']}\n" if cuda else ""
        if cache.is_file() and compiler not in cache.read_text():
            shutil.rmtree(directory)
        definitions = [f"-D{name}={value}" for name, value in options.items()]
        configure = [cmake, "-S", str(ROOT), "-B", str(directory), "-G", "Ninja", *definitions]
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(directory)], check=True)
        for extension in self.extensions:
            target = Path(self.get_ext_fullpath(extension.name))
            prebuilt = extension.name == LIBRARY and not cuda
            source = PREBUILT if prebuilt else directory / target.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source != target:  # as it is where the package is installed in editable mode
                shutil.copy2(source, target)


class CleanBuild(build):
    """Starts from an empty build_lib, since setuptools packs what an earlier build left there."""

    def run(self) -> None:
        """Remove leftovers, then build."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


extensions = [Extension("moe_ext._planner", sources=[])]
if build_mode() == "prebuilt":
    check_prebuilt()
if build_mode() == "prebuilt" or wants_cuda():
    extensions.append(Extension(LIBRARY, sources=[]))
setup(
    ext_modules=extensions,
    cmdclass={"build": CleanBuild, "build_ext": CMakeBuild},
    setup_requires=extra_build_requirements(),
)
