"""The command line `moe-ext`. Nothing of it is imported by the package."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_PACKAGES = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: of the command line; None is the process's.

    Returns:
        The exit code: 0 where all went well, 1 where something failed, 2 for arguments that are
        none. Of an error there is one line on stderr.
    """
    try:
        from moe_ext.cli._app import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _PACKAGES:
            raise
        print(
            f"moe-ext: the packages {' and '.join(_PACKAGES)} must be installed for the command "
            f'line, got no {error.name}: pip install "moe-ext[cli]"',
            file=sys.stderr,
        )
        return 1
    return run(arguments)


__all__ = ["main"]
