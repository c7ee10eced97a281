"""Files of this package: written whole or not at all, tensors as safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ext.precision._plan_json import check_header
from moe_ext.precision._tensor_files import wrong_file

_KEY = "moe_ext"  # of the metadata, whose values are strings


def target_of(path: str | Path) -> Path:
    """Return the file that a path leads to, of a link what it leads to.

    Raises:
        OSError: there is something else, a folder, a device or a pipe; or the path is a folder's,
            ending in a slash.
    """
    if os.path.basename(path) in ("", ".", ".."):
        raise IsADirectoryError(f"{path} must be a file to write, got a folder's name")
    target = Path(path).resolve()
    if target.is_dir():
        raise IsADirectoryError(f"{path} must be a file to write, got a folder")
    if target.exists() and not target.is_file():
        raise OSError(f"{path} must be a file to write, got a device, a pipe or a socket")
    return target


@contextmanager
def written(path: str | Path) -> Iterator[Path]:
    """Give a path to write to, and rename it to the real one when that has succeeded."""
    target = target_of(path)
    temporary = target.with_name(f".{target.name}.incomplete")
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def save_tensors(
    op: str, path: str | Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]
) -> None:
    """Write tensors, and beside them a header that JSON can hold."""
    safetensors = _safetensors(op)
    dense = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    with written(path) as temporary:
        try:
            safetensors.torch.save_file(dense, temporary, metadata={_KEY: json.dumps(header)})
        except safetensors.SafetensorError as error:
            raise OSError(f"{op}: {path} cannot be written: {error}") from None


def load_tensors(
    op: str,
    path: str | Path,
    form: str,
    version: int,
    device: torch.device | str | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and header of a file of the given form."""
    safetensors = _safetensors(op)
    with Path(path).open("rb"):
        pass  # the system's own words for a file that is not there, or may not be read
    try:
        opened = safetensors.safe_open(str(path), framework="pt", device=str(device or "cpu"))
    except safetensors.SafetensorError as error:
        raise wrong_file(op, path, error) from None
    with opened as file:
        try:
            header = json.loads((file.metadata() or {}).get(_KEY, "null"))
        except (json.JSONDecodeError, RecursionError):
            header = None
        check_header(op, header, form, version)
        return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118


def _safetensors(op: str) -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{op}: the package `safetensors` must be installed for files of tensors: "
            'pip install "moe-ext[precision]"'
        ) from None
    return safetensors
