"""Loads the CUDA library at the first op call on CUDA tensors, and explains all that can fail.

Nothing here runs at import. What is found out once (the library, a device) is remembered; failures
are not, so a call after the cause was removed succeeds.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_ext._configs import planner

LIBRARY_PATH = Path(__file__).parent / "moe_ext_cuda.so"
OLDEST_TORCH = (2, 10)
# The library holds a static CUDA 13.0 runtime and code for sm_90a only.
OLDEST_DRIVER_CUDA = 13000
CAPABILITY = (9, 0)


class DeviceKernels(NamedTuple):
    """What a call needs of a checked device: the C++ ops and what the dispatcher keys on."""

    sm_count: int
    grouped_gemm_launch: Callable[..., Any]
    grouped_gemm_launch_with: Callable[..., Any]
    quantize_fp8_configured: Callable[..., Any]
    sort_tokens_configured: Callable[..., Any]
    sort_tokens_scratch: Callable[..., int]
    combine_tokens_configured: Callable[..., Any]
    topk_routing_configured: Callable[..., Any]
    fused_moe_launch: Callable[..., Any]
    fused_moe_launch_with: Callable[..., Any]
    fused_moe_configured: Callable[..., Any]
    fused_moe_teach: Callable[..., None]
    fused_moe_masked_configured: Callable[..., Any]
    fused_moe_mixed_launch: Callable[..., Any]
    preload_kernels: Callable[..., int]


def torch_version() -> tuple[int, int]:
    """Return major and minor version of torch."""
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def driver_cuda_version() -> int | None:
    """Return the CUDA version the driver serves, 13000 for 13.0; None where there is no driver."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value if status == 0 else None


def _check_environment() -> None:
    if torch_version() < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise RuntimeError(
            f"moe_ext: torch must be {oldest} or newer for the CUDA kernels, got "
            f"{torch.__version__}"
        )
    if torch.version.cuda is None:
        raise RuntimeError(
            "moe_ext: torch must be a CUDA build to run the CUDA kernels, "
            f"got {torch.__version__}, built without CUDA"
        )
    if not LIBRARY_PATH.is_file():
        raise RuntimeError(
            f"moe_ext: the CUDA library must be at {LIBRARY_PATH}, got no such file: the package "
            "was installed for the CPU only; reinstall it with MOE_EXT_BUILD_CUDA=on in the "
            "environment of pip"
        )
    driver = driver_cuda_version()
    if driver is None or driver < OLDEST_DRIVER_CUDA:
        have = "none" if driver is None else f"one for CUDA {driver // 1000}.{driver % 1000 // 10}"
        raise RuntimeError(
            "moe_ext: the NVIDIA driver must serve CUDA 13.0 (version 580) or newer, "
            f"got {have}; update the driver"
        )


@functools.cache
def load() -> None:
    """Load the CUDA library, or say in a RuntimeError what is missing."""
    _check_environment()
    try:
        torch.ops.load_library(str(LIBRARY_PATH))
    except OSError as error:
        raise RuntimeError(
            f"moe_ext: the CUDA library {LIBRARY_PATH} must load under torch {torch.__version__} "
            f"(CUDA {torch.version.cuda}), got: {error.__cause__ or error}; reinstall the package"
        ) from error
    compiled = torch.ops.moe_ext.grouped_gemm_configs().strip()
    expected = planner().configs_csv().strip()
    if compiled != expected:
        raise RuntimeError(
            "moe_ext: the CUDA library must hold the kernels that the planner lists, got "
            f"{_first_difference(expected, compiled)}; one of the two files is from another build: "
            "reinstall the package"
        )


def _first_difference(expected: str, compiled: str) -> str:
    planned, found = expected.splitlines(), compiled.splitlines()
    for line, (want, have) in enumerate(zip(planned, found, strict=False)):
        if want != have:
            return f"{have!r} in place of {want!r} (line {line})"
    return f"{len(found) - 1} kernels in place of {len(planned) - 1}"


@functools.cache
def device_kernels(device_index: int) -> DeviceKernels:
    """Check the GPU `device_index` and return what a call on it needs."""
    load()
    try:
        properties = torch.cuda.get_device_properties(device_index)
    except (RuntimeError, AssertionError) as error:
        raise RuntimeError(
            f"moe_ext: CUDA must be usable on device cuda:{device_index}, got: {error}"
        ) from error
    capability = (properties.major, properties.minor)
    if capability != CAPABILITY:
        raise RuntimeError(
            "moe_ext: the GPU must be of compute capability 9.0 (H100, H200, H20), got "
            f"{properties.name} (cuda:{device_index}) of capability {capability[0]}.{capability[1]}"
        )
    ops = {name: _op(name) for name in DeviceKernels._fields if name != "sm_count"}
    return DeviceKernels(sm_count=properties.multi_processor_count, **ops)


def cuda_device(
    op: str, device: torch.device | str | int | None, argument: str = "device"
) -> tuple[int, DeviceKernels]:
    """Check the device that a user of `op` names by an argument, None for the current one.

    Returns:
        Its index, and what a call on it needs.
    """
    target = _named_device(op, device, argument)
    load()  # says what is missing where there is no CUDA to ask for its current device
    index = torch.cuda.current_device() if target.index is None else target.index
    return index, device_kernels(index)


def _named_device(op: str, device: torch.device | str | int | None, argument: str) -> torch.device:
    named = "cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device
    try:
        target = torch.device(named)
    except (RuntimeError, TypeError):
        target = None
    # torch keeps an index in eight bits, so that cuda:256 is cuda:0 to it.
    if target is None or (isinstance(named, str) and named not in (target.type, str(target))):
        raise ValueError(f"{op}: `{argument}` must be a CUDA device or its index, got {device!r}")
    if target.type != "cuda":
        raise ValueError(f"{op}: `{argument}` must be a CUDA device, got {target}")
    return target


def _op(name: str) -> Callable[..., Any]:
    packet = getattr(torch.ops.moe_ext, name, None)
    if packet is None:
        raise RuntimeError(
            f"moe_ext: the CUDA library must hold {name}, got a library without it, from an older "
            "build: reinstall the package"
        )
    overload = packet.default
    # What `OpOverload.__call__` does nothing but call, for 0.2 us.
    op: Callable[..., Any] = getattr(overload, "_op", overload)
    return op


def is_loaded() -> bool:
    """Whether the CUDA library is in this process."""
    return str(LIBRARY_PATH.resolve()) in torch.ops.loaded_libraries


def unavailable_reason() -> str | None:
    """Say why the CUDA library cannot be used here, or None where it can; loads it to find out."""
    try:
        load()
    except RuntimeError as error:
        return str(error)
    return None
