"""Every kernel that a layer may run gives the bits of the one it runs by default."""

from __future__ import annotations

import inspect

import moe_ext
import pytest
import torch
from moe_ext import _fused_moe_launch
from moe_ext._configs import all_configs
from moe_ext._fused_moe_checks import check_fused_moe
from moe_ext._fused_moe_kernels import Kernels
from moe_ext._fused_moe_run import run_fused_moe
from moe_ext._fused_moe_workspace import workspace_bytes
from support.fused_moe import OPERANDS, Sizes, random_layer
from support.kernels import rows_kernel
from support.tolerance import assert_same_bits

pytestmark = pytest.mark.gpu

# Groups of 1 to 150 rows and one without, features that do and do not fill tiles of 64 to 256 rows.
SIZES = {
    "whole_tiles": Sizes(201, 6, 3, 512, 256),
    "ragged": Sizes(201, 6, 3, 528, 200),
    "few_rows": Sizes(7, 6, 4, 512, 256),
}
LAYOUTS = {
    "bf16": "fp32",
    "channel": "promoted",
    "static": "promoted",
    "block": "block",
    "segments": "block",
}
JOINING = [config.id for config in all_configs() if config.output != "rows"]


def run_with(kernels, layer, monkeypatch):
    monkeypatch.setattr(_fused_moe_launch, "choose_kernels", lambda *_: kernels)
    operands = [layer[name] for name in OPERANDS]
    parameters = inspect.signature(run_fused_moe).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    del options["out"]
    options |= {name: value for name, value in layer.items() if name not in OPERANDS}
    sizes = layer["topk_ids"].numel(), layer["w2"].shape[1], layer["w2"].shape[2]
    size = workspace_bytes(*sizes, layer["w2"].shape[0])
    memory = torch.full((size + 512,), 0xFF, dtype=torch.uint8, device="cuda")
    options["workspace"] = memory[:size]
    out = torch.full_like(layer["hidden_states"], float("nan"))
    checked = check_fused_moe("fused_moe", out, *operands, **options)
    _fused_moe_launch.launch_checked(checked, out, *operands, **options)
    assert bool((memory[size:] == 0xFF).all())
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("config", JOINING)
def test_kernels_of_a_layer_agree_to_the_bit(layout, name, config, monkeypatch):
    gate_up = next(c for c in all_configs() if c.id == config)
    dtype = "bf16" if layout == "bf16" else "fp8"
    if (gate_up.dtype, gate_up.accumulate) != (dtype, LAYOUTS[layout]):
        pytest.skip("a kernel of another kind")
    if layout == "block" and name == "ragged" and not gate_up.swapped:
        pytest.skip("blocks of up that begin within 128 columns")
    layer = random_layer("expert" if layout == "static" else layout, "swiglu", SIZES[name], "cuda")
    if layout == "static":  # some features are past the largest that fits
        layer |= {"a1_scale": torch.tensor(0.01, device="cuda")}
        layer |= {"a2_scale": torch.tensor(0.002, device="cuda")}
    layer["topk_ids"] = layer["topk_ids"] % 5
    layer["topk_ids"][::4] = 0
    expected = moe_ext.fused_moe(**layer)
    kernels = Kernels(gate_up.index, rows_kernel(gate_up).index)
    assert_same_bits(run_with(kernels, layer, monkeypatch), expected)
    assert not bool(expected.isnan().any())
