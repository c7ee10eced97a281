"""A layer of experts in two precisions out of smaller ops: what `fused_moe_mixed` is on the CPU.

On CUDA too it computes what the chain of kernels does, which tests hold against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext._activations import activate
from moe_ext._fused_moe_scales import weight_scale_of
from moe_ext.combine_tokens import combine_tokens
from moe_ext.grouped_gemm import grouped_gemm
from moe_ext.precision._mixed_layer import (
    MixedLayer,
    map_of_part,
    parts_of_layer,
    places_of_ids,
    tensors_of,
)
from moe_ext.precision._slots import Part
from moe_ext.precision.layer_plan import FP8
from moe_ext.quantize import quantize_fp8
from moe_ext.sort_tokens import sort_tokens


def by_stages(
    hidden_states: Tensor,
    layer: MixedLayer,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
    addend: Tensor | None = None,
) -> Tensor:
    """Run a layer part by part, GEMM by GEMM, and add all results in the order of choices."""
    top_k = topk_ids.shape[1]
    weights: Tensor | None = topk_weights
    results, slot_row = [], None
    places = places_of_ids(layer, expert_map)
    for index, part in enumerate(parts_of_layer(layer)):
        own = map_of_part(places, part)
        offs, row_slot, rows_here = sort_tokens(topk_ids, part.num_experts, expert_map=own)
        slots = row_slot.clamp_min(0).long()
        rows = hidden_states[slots // top_k]
        if layer.apply_router_weight_on_input:
            rows = (rows.float() * topk_weights.reshape(-1)[slots, None].float()).bfloat16()
            weights = None
        results.append(_rows_of_part(layer, part, rows, offs))
        # A slot is in one part at most; its row is counted over all parts' buffers.
        rows_here = torch.where(rows_here < 0, rows_here, rows_here + index * row_slot.shape[0])
        slot_row = rows_here if slot_row is None else torch.maximum(slot_row, rows_here)
    assert slot_row is not None
    return combine_tokens(
        torch.cat(results),
        slot_row,
        weights,
        top_k=top_k,
        addend=addend,
        routed_scale=layer.routed_scale,
    )


def _rows_of_part(layer: MixedLayer, part: Part, rows: Tensor, offs: Tensor) -> Tensor:
    """Return the results of a part's experts for sorted rows; others than theirs are undefined."""
    tensors = tensors_of(layer, part)
    gate_up = _linear(layer, part.kinds[0], "w13", tensors, rows, offs, torch.float32)
    middle = activate(
        gate_up,
        layer.activation,
        alpha=layer.alpha,
        limit=layer.limit,
        gate_up_layout=layer.gate_up_layout,
    ).bfloat16()
    return _linear(layer, part.kinds[1], "w2", tensors, middle, offs, torch.bfloat16)


def _linear(
    layer: MixedLayer,
    kind: str,
    name: str,
    tensors: dict[str, Tensor | None],
    x: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply sorted rows by one stage's matrices, quantised first where these are FP8."""
    weight, bias = tensors[name], tensors[f"{name}_bias"]
    assert weight is not None
    if kind != FP8:
        return grouped_gemm(x, weight, offs, bias=bias, out_dtype=out_dtype)
    scale, static = tensors[f"{name}_scale"], tensors[f"a{name[1]}_scale"]
    assert scale is not None
    form = weight_scale_of(tuple(scale.shape), *weight.shape)
    assert form is not None
    by_row = form.granularity == "tensor" and static is None
    q, scale_q = quantize_fp8(x, "row" if by_row else form.granularity, scale=static)
    return grouped_gemm(
        q,
        weight,
        offs,
        scale_a=scale_q,
        scale_b=scale,
        bias=bias,
        n_segments=form.n_segments,
        out_dtype=out_dtype,
        accumulate=layer.accumulate,
    )
