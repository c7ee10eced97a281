"""Where commands write: tables on stdout, progress on stderr where a terminal watches."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from moe_ext.precision._files import target_of

_PIPE_COLUMNS = 200
"""Width where there is no terminal, so that nothing is cut off in files."""


def console() -> Console:
    """Return a console on what is stdout now; brackets and colons of names are no markup."""
    terminal = sys.stdout.isatty()
    return Console(
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not terminal,
        width=None if terminal else _PIPE_COLUMNS,
    )


def table(title: str, columns: dict[str, str]) -> Table:
    """Return an empty table; columns with "left" or "right"."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name, side in columns.items():
        made.add_column(name, justify="right" if side == "right" else "left")
    return made


@contextmanager
def progress(label: str, *, of_bytes: bool) -> Iterator[Callable[[int, int], None]]:
    """Give a function of how much more is done, and of how much; nothing is shown in pipes."""
    columns = [TextColumn("{task.description}"), BarColumn()]
    counts = [DownloadColumn(), TransferSpeedColumn()] if of_bytes else [MofNCompleteColumn()]
    terminal = Console(stderr=True)
    bar = Progress(
        *columns,
        *counts,
        TimeRemainingColumn(),
        console=terminal,
        transient=True,
        disable=not terminal.is_terminal,
    )
    with bar:
        task = bar.add_task(label, total=None)
        yield lambda step, total: bar.update(task, advance=step, total=total)


def check_output(path: Path, *inputs: Path) -> None:
    """Raise, before any work is done, unless a file can be written that is none of the inputs.

    Args:
        path: of the file; it may be there already.
        inputs: files that are read, and folders whose files are.

    Raises:
        ValueError: `path` is an input, or a file in a folder of inputs that is there already.
        OSError: it cannot be written.
    """
    for given in inputs:
        same = path.exists() and given.exists() and path.samefile(given)
        inside = path.exists() and given.is_dir() and given.resolve() in path.resolve().parents
        if same or inside:
            raise ValueError(f"{path} must be a file that is not read from, got one of {given}")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raise an OSError unless a file can be made, or written again."""
    folder = target_of(path).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        got = "one that cannot be written" if folder.is_dir() else "none"
        raise OSError(f"{folder} must be a folder to write {path.name} in, got {got}")


def mib(count: float) -> str:
    """Return bytes in MiB."""
    return f"{count / 2**20:,.1f}"


def size(count: float) -> str:
    """Return bytes in the largest unit that they fill, with four digits."""
    power = next((power for power in (4, 3, 2, 1) if count >= 2 ** (10 * power)), 0)
    return f"{count / 2 ** (10 * power):.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def decibels(ratio: float) -> str:
    """Return an energy over another in dB."""
    return f"{10 * math.log10(ratio):.1f}" if 0 < ratio < math.inf else "-"
