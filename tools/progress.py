"""Runs a command beside a line with the seconds it has taken; shows its output only if it fails."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence


def run(label: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Run `command` and return its output; print the output and exit when it fails."""
    start = time.monotonic()
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.5):
            print(
                f"\r{label} ... {time.monotonic() - start:.0f} s",
                end="",
                file=sys.stderr,
                flush=True,
            )

    ticker = threading.Thread(target=tick, daemon=True)
    if sys.stderr.isatty():
        ticker.start()
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, check=False
    )
    done.set()
    if ticker.is_alive():
        ticker.join()
    end = "\r" if sys.stderr.isatty() else ""
    outcome = "done" if result.returncode == 0 else f"failed with {result.returncode}"
    print(
        f"{end}{label} ... {outcome} in {time.monotonic() - start:.1f} s",
        file=sys.stderr,
        flush=True,
    )
    if result.returncode != 0:
        print(result.stdout, file=sys.stderr)
        sys.exit(result.returncode)
    return result.stdout
