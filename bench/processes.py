"""Processes that this one starts, compilers among them, as Python's audit events tell of them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from os import fspath
from typing import Any

# What stands between source text and a kernel, or a launcher of one, in the toolchains of CUDA, of
# Triton and of torch's extensions.
_COMPILERS = (
    *("nvcc", "cicc", "ptxas", "fatbinary", "nvlink", "cudafe++"),
    *("gcc", "g++", "cc", "c++", "cc1", "cc1plus", "clang", "clang++", "collect2", "as"),
    *("ld", "ld.bfd", "ld.gold", "ld.lld", "lld", "ninja", "make", "cmake"),
)
# A target in front, as in x86_64-linux-gnu-g++, and a version behind, as in gcc-12.
_COMPILER = re.compile(rf"(?:.+-)?({'|'.join(map(re.escape, _COMPILERS))})(?:-[\d.]+)?")
Command = tuple[str, ...]


def compiler_of(command: Sequence[str]) -> str | None:
    """Return the name of the compiler that a command runs, None where it runs none."""
    if not command:
        return None
    found = _COMPILER.fullmatch(command[0].rpartition("/")[2])
    return found[1] if found else None


class ProcessLog:
    """Every process that Python starts from now on; an audit hook stays until the process ends.

    What native code forks by itself raises no event. `resource.getrusage(RUSAGE_CHILDREN)` has
    such children once they were waited for.
    """

    def __init__(self) -> None:
        """Begin to listen."""
        self.commands: list[Command] = []
        self._by_popen: Command | None = None  # the last one, as long as no spawn has followed
        sys.addaudithook(self._hear)

    def compilers(self) -> list[str]:
        """Return the names of the compilers among them."""
        return [name for command in self.commands if (name := compiler_of(command))]

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            executable, words, *_ = arguments
            self._by_popen = _command(words, executable)
            self.commands.append(self._by_popen)
        elif event in ("os.posix_spawn", "os.exec"):
            path, words, *_ = arguments
            command = _command(words, path)
            # Popen spawns in this way too, and has said so.
            if command != self._by_popen:
                self.commands.append(command)
            self._by_popen = None
        elif event == "os.system":
            self.commands.append(_command(arguments[0], None))
        elif event in ("os.fork", "os.forkpty"):
            self.commands.append((event,))


def _command(words: Any, executable: Any) -> Command:
    """Bring what the events hold to one form."""
    if isinstance(words, str | bytes):
        text = words.decode(errors="replace") if isinstance(words, bytes) else words
        try:
            words = shlex.split(text)
        except ValueError:  # a quotation that does not end
            words = text.split()
    command = tuple(_text(word) for word in words)
    return command or (_text(executable),)


def _text(word: Any) -> str:
    path = fspath(word)
    return path.decode(errors="replace") if isinstance(path, bytes) else path
