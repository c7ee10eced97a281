"""Budgets as users write them: 2%, 512MiB, 30dB."""

from __future__ import annotations

import re

_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z%]+)\s*")


def byte_share(text: str, fp8_bytes: int) -> float:
    """Return a budget of bytes as a share of those that uniform FP8 takes.

    Args:
        text: "2%" of these, or bytes: "512MiB".
        fp8_bytes: what uniform FP8 takes.

    Raises:
        ValueError: the text is neither.
    """
    number, unit = _parts(text)
    if unit == "%":
        return number / 100
    if unit not in _UNITS:
        raise ValueError(
            f"plan: `--budget` must be a share of FP8's bytes, as 2%, or bytes in "
            f"{', '.join(_UNITS)}, as 512MiB, got {text!r}"
        )
    # Stages are whole bytes: half a byte more is none, and makes up for the rounding of a share.
    return (int(number * _UNITS[unit]) + 0.5) / fp8_bytes


def relative_error(text: str) -> float:
    """Return a budget of error, noise over signal.

    Args:
        text: "30dB" of signal over noise in energy, or "3%" of noise over signal in amplitude.

    Raises:
        ValueError: the text is neither.
    """
    number, unit = _parts(text)
    if unit.lower() == "db":
        return float(10 ** (-number / 20))
    if unit == "%":
        return number / 100
    raise ValueError(
        f"plan: `--error-budget` must be signal over noise, as 30dB, or noise over signal, as 3%, "
        f"got {text!r}"
    )


def _parts(text: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(text)
    return (float(found[1]), found[2]) if found else (0.0, "")
