"""Examples run as they stand, in the documentation and in examples/."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import moe_ext
import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
MODULES = (
    "moe_ext.fused_moe",
    "moe_ext.fused_moe_masked",
    "moe_ext._fused_moe_workspace",
    "moe_ext.grouped_gemm",
    "moe_ext.routing",
    "moe_ext.sort_tokens",
    "moe_ext.combine_tokens",
    "moe_ext.compat._grouped_mm",
    "moe_ext._explain",
    "moe_ext._explain_layer",
    "moe_ext._preload",
    "moe_ext._supports",
    "moe_ext.nn.experts",
    "moe_ext.nn.moe_layer",
    "moe_ext.precision.bank",
    "moe_ext.precision.calibration",
    "moe_ext.precision.layer_plan",
    "moe_ext.precision.plan",
    "moe_ext.precision.planning",
    "moe_ext.precision.realistic",
)


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module):
    result = doctest.testmod(sys.modules[module])
    assert result.attempted > 0
    assert result.failed == 0


def run_example(name, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(Path(moe_ext.__file__).parent.parent)}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_grouped_gemm_example():
    assert "torch.Size([300, 768])" in run_example("grouped_gemm.py")


def test_moe_module_example():
    output = run_example("moe_module.py")
    for part in ("FP8: largest", "two ranks: largest", "compiled: largest difference 0.0e+00"):
        assert part in output


def test_fp8_checkpoint_example():
    pytest.importorskip("safetensors")
    output = run_example("fp8_checkpoint.py")
    assert "48 tensors of 8 experts" in output
    assert "dtype=float8_e4m3fn" in output
    assert float(output.split()[-1].rstrip("%")) < 10


def test_expert_parallel_example():
    pytest.importorskip("torch.distributed")
    output = run_example("expert_parallel.py")
    assert "2 ranks with 8 of 16 experts each" in output
    assert float(re.search(r"largest difference (\S+) of", output)[1]) < 1e-2


def test_cuda_graph_example():
    output = run_example("cuda_graph.py")
    assert output.count("equal to an eager call: True") == 3
    assert ("captured" if torch.cuda.is_available() else "needs a GPU, got none") in output


def test_transformers_example():
    pytest.importorskip("transformers")
    output = run_example("transformers_model.py")
    for part in ("eager", "moe_ext", "compiled", "generated"):
        assert part in output


def test_precision_example():
    output = run_example("precision.py")
    assert output.count("of FP8's error") == 4
    errors = [float(line.split()[-4].rstrip("%")) for line in output.splitlines()[-3:]]
    assert errors[2] < errors[0] / 10


@pytest.mark.parametrize("rich", ["with", "without"])
def test_moe_layer_on_the_cpu(rich, tmp_path):
    if rich == "with":
        pytest.importorskip("rich")
        output = run_example("moe_layer.py", "--device", "cpu", "--tokens", "1", "20")
    else:
        script = EXAMPLES / "moe_layer.py"
        blocked = tmp_path / "run.py"
        blocked.write_text(
            "import runpy, sys\n"
            "sys.modules['rich'] = None\n"
            "sys.argv = ['moe_layer.py', '--device', 'cpu', '--tokens', '1', '20']\n"
            f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
        )
        output = run_example(str(blocked))
    for part in ("bf16", "fp8", "max error", "16 experts"):
        assert part in output


@pytest.mark.gpu
def test_moe_layer_on_the_gpu():
    output = run_example("moe_layer.py", "--tokens", "1", "64")
    for part in ("bf16", "fp8", "floor us", "128 experts"):
        assert part in output
