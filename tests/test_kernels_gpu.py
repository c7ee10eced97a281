"""Kernels that add up K in one order give the same bits: what `batch_invariant` rests on."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext._configs import all_configs
from support.fused_moe import quantize_weight
from support.tolerance import assert_same_bits

pytestmark = pytest.mark.gpu

KINDS = {"bf16": "fp32", "tensor": "promoted", "channel": "promoted", "block": "block"}


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("k", [192, 1024, 4096])
def test_kernels_without_split_k_agree_to_the_bit(layout, k):
    groups, n, rows = 3, 384, 150
    generator = torch.Generator().manual_seed(k)
    a = torch.randn(rows, k, generator=generator).cuda()
    b = torch.randn(groups, n, k, generator=generator).cuda()
    offs = torch.tensor([1, 20, rows], dtype=torch.int32, device="cuda")
    if layout == "bf16":
        operands = {"a": a.bfloat16(), "b": b.bfloat16()}
    else:
        granularity = {"tensor": "tensor", "channel": "row", "block": "1x128"}[layout]
        q, scale_a = moe_ext.quantize_fp8(a.bfloat16(), granularity)
        weight, scale_b = quantize_weight(b, layout, halves=False)
        operands = {"a": q, "b": weight, "scale_a": scale_a, "scale_b": scale_b}
    dtype = "bf16" if layout == "bf16" else "fp8"
    configs = [
        config.id
        for config in all_configs()
        if (config.dtype, config.accumulate, config.output) == (dtype, KINDS[layout], "rows")
        and config.split_k == 1
        and config.order != "SwapABRows"
    ]
    assert len(configs) > 3
    first = moe_ext.grouped_gemm(**operands, offs=offs, config=configs[0])
    for config in configs[1:]:
        out = moe_ext.grouped_gemm(**operands, offs=offs, config=config)
        assert_same_bits(out, first)
