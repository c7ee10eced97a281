"""Budgets as users write them: 2%, 512MiB, 30dB."""

from __future__ import annotations

import re
from collections.abc import Callable

import typer

_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_NUMBER = re.compile(r"\s*(\d{1,18}(?:\.\d+)?|\.\d+)\s*([A-Za-z%]+)\s*")


def byte_budget(text: str) -> Callable[[int], float]:
    """Return what makes of uniform FP8's bytes the share of them that a budget is.

    Args:
        text: "2%" of these, or bytes: "512MiB".

    Raises:
        typer.BadParameter: the text is neither.
    """
    number, unit = _parts(text)
    if unit == "%":
        return lambda _: number / 100
    if unit not in _UNITS:
        raise typer.BadParameter(
            f"--budget must be a share of FP8's bytes, as 2%, or bytes in "
            f"{', '.join(_UNITS)}, as 512MiB, got {text!r}"
        )
    # Stages are whole bytes: half a byte more is none, and makes up for the rounding of a share.
    count = int(number * _UNITS[unit]) + 0.5
    return lambda fp8_bytes: count / fp8_bytes


def relative_error(text: str) -> float:
    """Return a budget of error, noise over signal.

    Args:
        text: "30dB" of signal over noise in energy, or "3%" of noise over signal in amplitude.

    Raises:
        typer.BadParameter: the text is neither.
    """
    number, unit = _parts(text)
    if unit.lower() == "db":
        return float(10 ** (-number / 20))
    if unit == "%":
        return number / 100
    raise typer.BadParameter(
        f"--error-budget must be signal over noise, as 30dB, or noise over signal, as 3%, "
        f"got {text!r}"
    )


def _parts(text: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(text)
    return (float(found[1]), found[2]) if found else (0.0, "")
