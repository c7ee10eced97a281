"""Runs inside the environment of tools/check_wheel.py: what is installed works, and works alone.

python -I tools/wheel_smoke.py 1        # 1: the wheel holds the CUDA library
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import moe_ext
import torch

COMPILERS = ("c++", "cc", "g++", "gcc", "clang++", "nvcc", "cmake", "ninja", "make")


def main() -> None:
    """Look around, ask what is installed, and run a layer on the CPU."""
    assert Path(moe_ext.__file__).is_relative_to(sys.prefix), moe_ext.__file__
    seen = [path for name in COMPILERS if (path := shutil.which(name))]
    assert not seen, f"programs that build are in sight: {seen}"

    info = moe_ext.build_info()
    print(info)
    assert info["version"] == moe_ext.__version__
    assert info["kernels"] == len(moe_ext.kernels()) > 0
    assert info["cuda_library"] is bool(int(sys.argv[1]))

    torch.manual_seed(0)
    hidden = torch.randn(10, 64).bfloat16()
    w13 = (torch.randn(4, 96, 64) / 8).bfloat16()
    w2 = (torch.randn(4, 64, 48) / 7).bfloat16()
    weights, ids = moe_ext.topk_routing(torch.randn(10, 4), 2)
    out = moe_ext.fused_moe(hidden, w13, w2, weights, ids).float()
    wanted = torch.zeros(10, 64)
    for token, choices in enumerate(ids.tolist()):
        for place, expert in enumerate(choices):
            gate, up = (w13[expert].float() @ hidden[token].float()).chunk(2)
            value = w2[expert].float() @ (torch.nn.functional.silu(gate) * up)
            wanted[token] += weights[token, place] * value
    error = (out - wanted).abs().max() / wanted.abs().max()
    assert error < 0.02, f"the layer is off by {error:.1%}"


if __name__ == "__main__":
    main()
