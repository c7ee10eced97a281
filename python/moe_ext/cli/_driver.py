"""The GPUs of this machine by the driver's word, also under a torch that was built without CUDA."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_NAME_BYTES = 256


class Card(NamedTuple):
    """One GPU."""

    name: str
    capability: tuple[int, int]


def cards() -> list[Card]:
    """List the GPUs; none where there is no driver, or it does not answer."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for index in range(count.value):
        device, number = ctypes.c_int(), ctypes.c_int()
        name = ctypes.create_string_buffer(_NAME_BYTES)
        if driver.cuDeviceGet(ctypes.byref(device), index):
            continue
        if driver.cuDeviceGetName(name, _NAME_BYTES, device):
            continue
        parts = []
        for attribute in _CAPABILITY:
            if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device):
                break
            parts.append(number.value)
        if len(parts) == len(_CAPABILITY):
            found.append(Card(name.value.decode(errors="replace"), (parts[0], parts[1])))
    return found
