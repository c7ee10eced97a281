"""Calls of the gather op, and what they write into poison."""

from __future__ import annotations

import torch
from moe_ext import _library

from support.inputs import poisoned
from support.quantize import FP8

# The numbers of csrc/fused_moe/gather.hpp, and what `quantize_fp8` calls them.
FORMATS = {"bf16": 0, "static": 1, "row": 2, "1x128": 3}
GRANULARITIES = {"static": "tensor", "row": "row", "1x128": "1x128"}
PAD = 16
STATIC_SCALE = 0.037


class Outputs:
    """What a call writes: values with gaps between the rows, scales with gaps, all of it NaN."""

    def __init__(self, name, rows, hidden):
        dtype = torch.bfloat16 if name == "bf16" else FP8
        self.store = poisoned((rows, -(-hidden // 16) * 16 + PAD), dtype, "cuda")
        self.values = self.store[:, :hidden]
        shapes = {"row": (2 * rows,), "1x128": (rows, -(-hidden // 128) + 3)}
        self.scale = None
        if name in shapes:
            self.scale = poisoned(shapes[name], torch.float32, "cuda")
        if name == "row":
            self.scale = self.scale[::2]
        if name == "1x128":
            self.scale = self.scale[:, :-3]


def gather(
    name,
    x,
    row_slot,
    top_k,
    out,
    *,
    num_rows=None,
    weights=None,
    programmatic=False,
    slot_row=None,
):
    _library.load()
    static = torch.full((), STATIC_SCALE, device="cuda") if name == "static" else None
    if num_rows is not None and not isinstance(num_rows, torch.Tensor):
        num_rows = torch.tensor([num_rows], dtype=torch.int32, device="cuda")
    torch.ops.moe_ext.gather_quantize_configured(
        x,
        row_slot,
        num_rows,
        weights,
        out.values,
        out.scale,
        static,
        top_k,
        FORMATS[name],
        programmatic,
        slot_row,
    )
