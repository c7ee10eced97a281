"""No compiler and no Triton: not at import, in the first call, or in a hundred shapes after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import moe_ext
import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import resource
import sys

import torch

from bench.processes import ProcessLog

device, break_it = sys.argv[1:]
if device == "cuda":
    torch.zeros(1, device=device)  # what torch does to start CUDA is not the package's
log = ProcessLog()
tried = []


def hear(event, arguments):
    # An import that fails because there is no Triton here would succeed elsewhere.
    if event == "import" and arguments[0].partition(".")[0] == "triton":
        tried.append(arguments[0])


before = resource.getrusage(resource.RUSAGE_CHILDREN)
had_triton = "triton" in sys.modules
sys.addaudithook(hear)

import moe_ext


def layer(num_tokens, hidden, intermediate, num_experts, top_k, fp8):
    def normal(*shape):
        return torch.randn(shape, device=device).bfloat16() / 8

    weights = [normal(num_experts, 2 * intermediate, hidden)]
    weights += [normal(num_experts, hidden, intermediate)]
    scales = {}
    if fp8:
        (w13, s13), (w2, s2) = (moe_ext.quantize_fp8(weight, "128x128") for weight in weights)
        weights, scales = [w13, w2], {"w13_scale": s13, "w2_scale": s2}
    logits = torch.randn(num_tokens, num_experts, device=device)
    routing = moe_ext.topk_routing(logits, top_k)
    out = moe_ext.fused_moe(normal(num_tokens, hidden), *weights, *routing, **scales)
    assert out.shape == (num_tokens, hidden)
    assert bool(out.isfinite().all())


if device == "cuda":
    moe_ext.preload()
for step in range(101):
    hidden, intermediate = 64 + 8 * (step % 9), 32 + 8 * (step % 7)
    layer(1 + 3 * step, hidden, intermediate, 4 + step % 5, 1 + step % 3, step % 2)
    offs = torch.tensor([step, 2 * step], dtype=torch.int32, device=device)
    a, b = (torch.ones(shape, device=device).bfloat16() for shape in ((2 * step, 32), (2, 16, 32)))
    assert bool((moe_ext.grouped_gemm(a, b, offs) == 32).all())
print(moe_ext.explain(dtype="bf16", num_rows=2, num_groups=1, n=8, k=16))
print(moe_ext.supports(dtype="bf16", num_rows=2, num_groups=1, n=8, k=16, device=device))

if break_it == "triton":
    try:
        import triton.language
    except ImportError:
        pass
elif break_it == "compiler":
    import subprocess

    subprocess.run(["cc", "--version"], check=False, capture_output=True)

after = resource.getrusage(resource.RUSAGE_CHILDREN)
assert not tried, f"triton is imported: {tried}"
assert had_triton or "triton" not in sys.modules, "triton is imported"
assert not log.commands, f"processes are started: {log.commands}"
assert after == before, "native code has started a process"
"""


def run(device, break_it="nothing"):
    paths = (str(Path(moe_ext.__file__).parent.parent), str(ROOT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, device, break_it]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_nothing_compiles(device):
    result = run(device)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("break_it", "said"), [("triton", "triton is imported"), ("compiler", "processes are started")]
)
def test_it_would_be_noticed(break_it, said):
    result = run("cpu", break_it)
    assert result.returncode == 1
    assert said in result.stderr
