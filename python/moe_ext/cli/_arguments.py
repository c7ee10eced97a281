"""Texts of arguments that cannot be read: exit code 2, before any work is done."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import typer

from moe_ext.precision._files import target_of


def check_one_of(option: str, text: str, choices: Iterable[str]) -> None:
    """Raise unless a text is one of the choices."""
    known = tuple(choices)
    if text not in known:
        raise typer.BadParameter(f"{option} must be one of {', '.join(known)}, got {text}")


def check_device(option: str, text: str, kind: str | None = None) -> None:
    """Raise unless a text names a device as torch does, of a kind if one is given."""
    try:
        found = torch.device(text).type
    except RuntimeError:
        found = None
    if found is None or kind not in (None, found):
        wanted = "a CUDA device, such as cuda:0" if kind == "cuda" else "a device of torch's"
        raise typer.BadParameter(f"{option} must be {wanted}, got {text}")


def file_to_write(text: str) -> Path:
    """Return the path of a file; a `Path` no longer says that the text ended in a slash.

    Raises:
        OSError: there can be no file, see `target_of`.
    """
    target_of(text)
    return Path(text)


def check_device_here(option: str, text: str) -> None:
    """Raise unless a text names a device that tensors can be on here."""
    check_device(option, text)
    try:
        torch.zeros(1, device=text).item()
    except (AssertionError, RuntimeError):  # the first of a torch that is built without it
        raise typer.BadParameter(
            f"{option} must be a device that can hold tensors here, got {text}"
        ) from None


def check_picture(option: str, path: Path) -> None:
    """Raise unless a picture's file has the suffix of what is written."""
    if path.suffix.lower() != ".png":
        raise typer.BadParameter(f"{option} must be a file named *.png, got {path}")
