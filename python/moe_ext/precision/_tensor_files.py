"""Safetensors files by their headers: ranges of bytes are read, and headers written before data.

The package `safetensors` maps whole files, whose pages count as memory of the process once read.
Here a reader brings its own memory, and all of a file's places are known before it is written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Of tensors that are read; others can be copied."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes; what the format allows
_ALIGNMENT = 8  # of the data behind a header


class Entry(NamedTuple):
    """One tensor of a file."""

    path: Path
    dtype: str  # the format's name
    shape: tuple[int, ...]
    begin: int  # of the file, bytes
    num_bytes: int


class Header(NamedTuple):
    """What a file says of itself."""

    entries: dict[str, Entry]  # in order of their bytes
    metadata: dict[str, str]


def read_header(op: str, path: Path) -> Header:
    """Return the header of a file, after checking that its tensors are there.

    Raises:
        ValueError: the file is no safetensors file, or is cut off.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise wrong_file(op, path, f"{size} bytes without a header")
        text = file.read(length)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise wrong_file(op, path, "a header that is no JSON") from None
    if not isinstance(value, dict):
        raise wrong_file(op, path, "a header that is no object")
    metadata = value.pop("__metadata__", None) or {}
    entries = {name: _entry(op, path, name, own, 8 + length) for name, own in value.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].num_bytes)))
    end = 8 + length
    for name, entry in ordered.items():
        if entry.begin != end:
            raise wrong_file(op, path, f'"{name}" at byte {entry.begin} in place of {end}')
        end += entry.num_bytes
    if end != size:
        raise wrong_file(op, path, f"{size} bytes in place of {end}")
    return Header(ordered, metadata)


def _entry(op: str, path: Path, name: str, value: Any, data: int) -> Entry:
    try:
        dtype, shape = value["dtype"], tuple(value["shape"])
        begin, end = value["data_offsets"]
        count = math.prod(shape)
        right = isinstance(dtype, str) and 0 <= begin <= end and min((0, *shape)) == 0
    except (KeyError, TypeError, ValueError):
        raise wrong_file(op, path, f'"{name}" without dtype, shape and place') from None
    known = DTYPES.get(dtype) if right else None
    if not right or (known is not None and end - begin != count * known.itemsize):
        raise wrong_file(op, path, f'"{name}" of {dtype} {shape} in {end - begin} bytes')
    return Entry(path, dtype, shape, data + begin, end - begin)


def wrong_file(op: str, path: str | Path, got: object) -> ValueError:
    """Return the error for a file that is no safetensors file, or not all of one."""
    return ValueError(
        f"{op}: {path} must be a whole safetensors file, got {got}: it is truncated, damaged or "
        "of another form"
    )


def meta_tensor(entry: Entry) -> Tensor:
    """Return a tensor without memory that has the shape and dtype of one in a file."""
    return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")


def read_tensor(entry: Entry) -> Tensor:
    """Read one tensor, into memory of its own."""
    buffer = bytearray(entry.num_bytes)
    with entry.path.open("rb", buffering=0) as file:
        read_into(file.fileno(), entry.path, entry.begin, memoryview(buffer))
    if not buffer:  # which torch takes for none
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    return torch.frombuffer(buffer, dtype=DTYPES[entry.dtype]).reshape(entry.shape)


def read_into(descriptor: int, path: Path, begin: int, view: memoryview) -> None:
    """Fill memory from a place of a file."""
    while view:
        count = os.preadv(descriptor, [view], begin)
        if not count:
            raise OSError(f"{path} must not change while it is read, got an end at byte {begin}")
        begin, view = begin + count, view[count:]


def write_from(descriptor: int, begin: int, view: memoryview) -> None:
    """Write memory to a place of a file."""
    while view:
        count = os.pwrite(descriptor, view, begin)
        begin, view = begin + count, view[count:]


def item_bytes(dtype: str, shape: tuple[int, ...], num_bytes: int) -> int:
    """Return the bytes of an element, for dtypes that torch may not know as well."""
    known = DTYPES.get(dtype)
    return known.itemsize if known is not None else num_bytes // max(math.prod(shape), 1)


def lay_out(
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """Give each tensor its place in a file.

    Args:
        tensors: dtype, shape and bytes of each, by name.
        metadata: of the file.

    Returns:
        What the file begins with, where each tensor begins, and the size of the file. Larger
        elements come first, so that each tensor is aligned to its own.
    """
    names = sorted(tensors, key=lambda name: -item_bytes(*tensors[name]))
    places, end = {}, 0
    for name in names:
        places[name] = end
        end += tensors[name][2]
    value: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name in names:
        dtype, shape, count = tensors[name]
        offsets = [places[name], places[name] + count]
        value[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps(value, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, begin in places.items()}, len(head) + end
