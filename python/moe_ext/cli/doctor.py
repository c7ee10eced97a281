"""`moe-ext doctor`: what this machine runs, what would fail on it, and what to do."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections import Counter
from enum import Enum
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from moe_ext import _library, build_info
from moe_ext._configs import all_configs
from moe_ext._version import __version__
from moe_ext.cli._console import console, table
from moe_ext.cli._driver import cards

_OLDEST_PYTHON = (3, 10)
_OPTIONAL = {
    "safetensors": "files of statistics, plans of checkpoints",
    "matplotlib": "moe-ext report --png",
    "numpy": "benchmarks",
    "transformers": "models of Transformers",
    "accelerate": "models of Transformers on a GPU",
}
_CUDA_DEVICE = "CUDA kernels"


class State(Enum):
    """What a check found."""

    GOOD = "ok"
    ABSENT = "-"
    WRONG = "wrong"


class Check(NamedTuple):
    """One line of the table."""

    what: str
    found: str
    state: State
    advice: str = ""


def doctor(
    check: Annotated[
        bool, typer.Option("--gpu", help="Fail unless the CUDA kernels can run here.")
    ] = False,
) -> None:
    """Say what is installed, what runs on this machine, and what to do about the rest."""
    checks = _checks()
    rows = table(
        f"moe_ext {__version__}", {"": "left", "found": "left", "state": "left", "do": "left"}
    )
    for own in checks:
        rows.add_row(own.what, own.found, own.state.value, own.advice)
    console().print(rows)
    if any(own.state is State.WRONG for own in checks):
        raise typer.Exit(1)
    if check and not any(own.what == _CUDA_DEVICE and own.state is State.GOOD for own in checks):
        raise typer.Exit(1)


def _checks() -> list[Check]:
    return [_python(), _torch(), _kernels(), *_driver(), *_cards(), _file(), _runs(), *_packages()]


def _python() -> Check:
    state = State.GOOD if sys.version_info >= _OLDEST_PYTHON else State.WRONG
    wanted = ".".join(map(str, _OLDEST_PYTHON))
    advice = "" if state is State.GOOD else f"install Python {wanted} or newer"
    return Check("Python", f"{platform.python_version()}, {sys.executable}", state, advice)


def _torch() -> Check:
    cuda = torch.version.cuda
    found = f"{torch.__version__}, {'built without CUDA' if cuda is None else f'CUDA {cuda}'}"
    if _library.torch_version() < _library.OLDEST_TORCH:
        oldest = ".".join(map(str, _library.OLDEST_TORCH))
        return Check("torch", found, State.WRONG, f"install torch {oldest} or newer")
    return Check("torch", found, State.GOOD)


def _kernels() -> Check:
    try:
        configs = all_configs()
    except RuntimeError as error:
        return Check("kernels listed", "none", State.WRONG, str(error))
    counts = Counter(f"{config.dtype} {config.accumulate}" for config in configs)
    found = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    return Check("kernels listed", f"{len(configs)}: {found}", State.GOOD)


def _driver() -> list[Check]:
    version = _library.driver_cuda_version()
    if version is None:
        return [Check("NVIDIA driver", "none", State.ABSENT)]
    found = f"for CUDA {version // 1000}.{version % 1000 // 10}"
    if version < _library.OLDEST_DRIVER_CUDA:
        return [Check("NVIDIA driver", found, State.WRONG, "install driver 580 or newer")]
    return [Check("NVIDIA driver", found, State.GOOD)]


def _cards() -> list[Check]:
    found = cards()
    if not found:
        return [Check("GPU", "none", State.ABSENT)]
    wanted = ".".join(map(str, _library.CAPABILITY))
    checks = []
    for index, card in enumerate(found):
        right = card.capability == _library.CAPABILITY
        said = f"{card.name}, compute capability {'.'.join(map(str, card.capability))}"
        advice = "" if right else f"the kernels are for {wanted} alone (H100, H200, H20)"
        checks.append(Check(f"GPU {index}", said, State.GOOD if right else State.ABSENT, advice))
    return checks


def _file() -> Check:
    path = _library.LIBRARY_PATH
    if path.is_file():
        found = f"{path}, {path.stat().st_size / 2**20:.1f} MiB"
        missing = _missing_kernels(path)
        if missing:
            advice = f"of another build, without {missing[0]}: reinstall the package"
            return Check("CUDA library", found, State.WRONG, advice)
        return Check("CUDA library", f"{found}, with the kernels listed", State.GOOD)
    advice = "reinstall with MOE_EXT_BUILD_CUDA=on" if _can_have_kernels() else ""
    return Check(
        "CUDA library", "none", State.WRONG if _can_have_kernels() else State.ABSENT, advice
    )


def _missing_kernels(path: Path) -> list[str]:
    """Return the kernels whose names are nowhere in the library: it need not load to tell."""
    try:
        ids = [config.id for config in all_configs()]
    except RuntimeError:
        return []  # a check of its own says so
    data = path.read_bytes()
    return [own for own in ids if own.encode() not in data]


def _runs() -> Check:
    """Load the library where there is a card for it, and say what would come of a call."""
    reason = _library.unavailable_reason()
    if reason is None and not _can_have_kernels():
        reason = "no GPU that they are for"
    if reason is None:
        built = build_info()
        found = (
            f"the library loads: {built.get('arch')}, CUDA {built.get('cuda_toolkit')}, CUTLASS "
            f"{built.get('cutlass')}"
        )
        try:
            for index in range(torch.cuda.device_count()):
                if torch.cuda.get_device_capability(index) == _library.CAPABILITY:
                    _library.device_kernels(index)
        except RuntimeError as error:
            return Check(_CUDA_DEVICE, found, State.WRONG, str(error))
        return Check(_CUDA_DEVICE, found, State.GOOD)
    said = reason.removeprefix("moe_ext: ")
    if _can_have_kernels():
        return Check(_CUDA_DEVICE, "cannot run", State.WRONG, said)
    return Check(_CUDA_DEVICE, "cannot run", State.ABSENT, f"{said}; CPU tensors work, slowly")


def _can_have_kernels() -> bool:
    """Whether a card is here that the kernels are for."""
    return any(card.capability == _library.CAPABILITY for card in cards())


def _packages() -> list[Check]:
    checks = []
    for name, use in _OPTIONAL.items():
        there = importlib.util.find_spec(name) is not None
        advice = "" if there else f"pip install {name}, for {use}"
        found = "installed" if there else "none"
        checks.append(Check(name, found, State.GOOD if there else State.ABSENT, advice))
    return checks
