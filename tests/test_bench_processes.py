"""What the benchmark counts as a process and as a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.processes import compiler_of

ROOT = Path(__file__).parent.parent
STARTS = """
import os
import subprocess
import sys

from bench.processes import ProcessLog

log = ProcessLog()
quiet = {"check": False, "capture_output": True}
subprocess.run([sys.executable, "-c", ""], **quiet)
subprocess.run("true && true", shell=True, **quiet)
subprocess.run([sys.executable, "-c", ""], close_fds=False)  # by posix_spawn, where Popen can
os.system("true")
os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
print([command[0].rpartition("/")[2] for command in log.commands])
print(log.compilers())
"""


@pytest.mark.parametrize(
    ("command", "compiler"),
    [
        (["/usr/local/cuda/bin/nvcc", "-O3"], "nvcc"),
        (["/site-packages/triton/backends/nvidia/bin/ptxas", "x.ptx"], "ptxas"),
        (["x86_64-linux-gnu-gcc-12", "main.c"], "gcc"),
        (["c++"], "c++"),
        (["clang++-18.1"], "clang++"),
        (["/usr/bin/git", "rev-parse"], None),
        (["gccgo"], None),
        (["python", "nvcc"], None),
        ([], None),
    ],
)
def test_compilers(command: list[str], compiler: str | None) -> None:
    assert compiler_of(command) == compiler


def test_each_process_is_counted_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    commands, compilers = done.stdout.splitlines()
    python = Path(sys.executable).name
    assert commands == str([python, "sh", python, "true", "true"])
    assert compilers == "[]"
