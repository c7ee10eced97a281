"""None in place of a tensor that an op needs."""

from __future__ import annotations

import re

import moe_ext
import pytest
import torch

ONES, INTS = torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(3, dtype=torch.int32)
BUFFERS = torch.ones(3, 2, 8, dtype=torch.bfloat16)
W13, W2 = (torch.ones(3, n, 8, dtype=torch.bfloat16) for n in (16, 8))
ROUTED = {"weights": torch.ones(3, 2), "ids": torch.ones(3, 2, dtype=torch.int32)}
QUANTISED = {"q": ONES.to(torch.float8_e4m3fn), "scale_out": torch.ones(3)}


@pytest.mark.parametrize(
    ("op", "argument", "arguments", "options"),
    [
        ("topk_routing", "logits", (None, 2), {}),
        ("topk_routing", "logits", (None, 2), {"correction_bias": torch.ones(8)}),
        ("topk_routing_out", "logits", (None, 2), ROUTED),
        ("sort_tokens", "topk_ids", (None, 4), {}),
        ("sort_tokens", "topk_ids", (None, 4), {"expert_map": INTS}),
        ("quantize_fp8", "x", (None, "row"), {}),
        ("quantize_fp8", "x", (None, "tensor"), {"scale": torch.ones(())}),
        ("quantize_fp8_out", "x", (None, "row"), QUANTISED),
        ("combine_tokens", "y", (None, INTS, None), {"top_k": 1}),
        ("combine_tokens", "y", (None, None, None), {"top_k": 1}),
        ("combine_tokens", "slot_row", (ONES, None, None), {"top_k": 1}),
        ("fused_moe_masked", "hidden_states", (None, W13, W2, INTS), {}),
        ("fused_moe_masked", "w13", (BUFFERS, None, W2, INTS), {}),
        ("fused_moe_masked", "w2", (BUFFERS, W13, None, INTS), {}),
        ("fused_moe_masked", "counts", (BUFFERS, W13, W2, None), {}),
        ("fused_moe_masked_out", "counts", (BUFFERS, W13, W2, None), {"out": BUFFERS}),
        ("fused_moe_masked_out", "out", (BUFFERS, W13, W2, INTS), {"out": None}),
    ],
)
def test_none(op, argument, arguments, options):
    message = re.escape(f"{op}: `{argument}` must be a tensor, got None")
    with pytest.raises(ValueError, match=f"^{message}$"):
        getattr(moe_ext, op)(*arguments, **options)
