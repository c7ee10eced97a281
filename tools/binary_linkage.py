"""What moe_ext_cuda.so may need: LibTorch's stable ABI of the target version, libstdc++, libc."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

TARGET = (2, 10)
MAX_BYTES = 40 * 2**20
NEEDED = {
    "libtorch.so",
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
}
NEEDED |= {"libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
SHIM_HEADERS = (
    "torch/csrc/inductor/aoti_torch/c/shim.h",
    "torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h",
    "torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h",
    "torch/csrc/stable/c/shim.h",
)


def run(*command: str) -> str:
    """Output of a tool of binutils or CUDA."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def torch_include() -> Path:
    """The include directory of the installed torch, found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "check_binary: torch's headers say which symbols are stable; install torch"
        )
    return Path(spec.submodule_search_locations[0], "include")


def shim_versions(include: Path) -> dict[str, tuple[int, int]]:
    """Each shim function with the torch that brought it, (0, 0) for those older than 2.10.

    The headers guard later ones with `#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_11_0` and so on.
    """
    versions: dict[str, tuple[int, int]] = {}
    for header in SHIM_HEADERS:
        guards: list[tuple[int, int]] = []
        for line in (include / header).read_text().splitlines():
            if re.match(r"\s*#\s*if", line):
                gate = re.search(r"TORCH_FEATURE_VERSION\s*>=\s*TORCH_VERSION_(\d+)_(\d+)", line)
                guards.append((int(gate[1]), int(gate[2])) if gate else (0, 0))
            elif re.match(r"\s*#\s*endif", line):
                guards.pop()
            for name in re.findall(r"\b((?:aoti_torch|torch)_\w+)\s*\(", line):
                versions.setdefault(name, max(guards, default=(0, 0)))
    return versions


def build_paths(library: Path) -> list[str]:
    """Every string of the library that names the source tree or where packages are installed."""
    source_tree = str(Path(__file__).resolve().parent.parent)
    markers = (source_tree, str(torch_include().parent), "site-packages", "dist-packages")
    strings = re.findall(rb"[\x20-\x7e]{4,}", library.read_bytes())
    found = {text.decode() for text in strings}
    return sorted(text for text in found if any(marker in text for marker in markers))


def find_problems(library: Path) -> list[str]:
    """Every reason why the library might not load elsewhere."""
    problems = []
    allowed = shim_versions(torch_include())
    for line in run("nm", "-D", "--undefined-only", str(library)).splitlines():
        kind, _, symbol = line.strip().partition(" ")
        name, _, version = symbol.partition("@")
        if re.match(r"_?Py[A-Z_]", name):
            problems.append(f"Python symbol {name}")
        elif version or kind == "w":
            continue
        elif name not in allowed:
            problems.append(f"symbol {name} is not part of LibTorch's stable ABI")
        elif allowed[name] > TARGET:
            problems.append(f"symbol {name} came with torch {allowed[name]}, after {TARGET}")
    for line in run("nm", "-D", "--defined-only", str(library)).splitlines():
        name = line.split()[-1]
        if re.match(r"(cuda[A-Z]|PyInit_|__cudart)", name):
            problems.append(f"the library exports {name}")
    dynamic = run("readelf", "-d", "-W", str(library))
    for name in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic):
        if name not in NEEDED:
            problems.append(f"needed library {name} is not one of {', '.join(sorted(NEEDED))}")
    if "[libtorch.so]" not in dynamic:
        problems.append(
            "libtorch.so is not a needed library, so torch's CUDA symbols are out of its reach"
        )
    if re.search(r"\((RPATH|RUNPATH)\)", dynamic):
        problems.append("the library has an rpath")
    problems += [f"the library holds the path {path}" for path in build_paths(library)]
    if library.stat().st_size > MAX_BYTES:
        problems.append(f"{library.stat().st_size} bytes, the limit is {MAX_BYTES}")
    return problems
