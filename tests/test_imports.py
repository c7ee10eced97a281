"""Importing and calling the package compiles nothing: no Triton, no process started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import moe_ext
import pytest

SCRIPT = """
import sys
import torch

before = set(sys.modules)
started = []


def watch(event, arguments):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"):
        started.append((event, arguments))


sys.addaudithook(watch)
import moe_ext

assert not moe_ext._library.is_loaded(), "the CUDA library is loaded at import"
device = sys.argv[1]
a = torch.ones(2, 16, device=device).bfloat16()
b = torch.ones(1, 8, 16, device=device).bfloat16()
offs = torch.tensor([2], dtype=torch.int32, device=device)
out = moe_ext.grouped_gemm(a, b, offs)
assert out.tolist() == [[16.0] * 8] * 2
print(moe_ext.explain(dtype="bf16", num_rows=2, num_groups=1, n=8, k=16))
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert "triton" not in new, "triton is imported"
assert "safetensors" not in new, "safetensors, which is optional, is imported"
assert not started, started
"""


def run(script, *arguments):
    package_root = str(Path(moe_ext.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": package_root}
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_no_triton_and_no_process(device):
    result = run(SCRIPT, device)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", moe_ext.__all__)
def test_public_names_exist(name):
    assert getattr(moe_ext, name) is not None


def test_source_names_no_compiler():
    for path in Path(moe_ext.__file__).parent.glob("*.py"):
        text = path.read_text()
        for word in ("import triton", "nvrtc", "subprocess", "cpp_extension", "os.environ"):
            assert word not in text, f"{path.name} mentions {word}"
