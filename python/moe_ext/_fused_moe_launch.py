"""The chain of kernels behind `fused_moe` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext._activations import INTERLEAVED, gating
from moe_ext._fused_moe_checks import Layer
from moe_ext._fused_moe_kernels import choose_kernels, row_format
from moe_ext._fused_moe_workspace import ALIGNMENT, workspace_layout
from moe_ext._library import device_kernels

# Bits of the C++ op's `flags`, twins of LayerFlag, csrc/fused_moe/op.hpp.
_INTERLEAVED, _UNGATED, _WEIGHTS_ON_INPUT = (1 << bit for bit in range(3))


def _launch_fused_moe(
    out: Tensor,
    layer: Layer,
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    a1_scale: Tensor | None,
    a2_scale: Tensor | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    apply_router_weight_on_input: bool,
    first_expert: int,
    expert_map: Tensor | None,
    addend: Tensor | None,
    routed_scale: float,
    accumulate: str,
    batch_invariant: bool,
    workspace: Tensor | None,
) -> None:
    """Fill `out` on the GPU; every argument has been checked, `out` has at least one row.

    `workspace` has `workspace_bytes` of memory, at any address, or is None; `workspace_layout` says
    what lies where from its first multiple of 256 bytes on.
    """
    device = device_kernels(hidden_states.get_device())
    kernels = choose_kernels(
        layer, accumulate, w13_bias is not None, batch_invariant, device.sm_count
    )
    parts = workspace_layout(
        layer.num_tokens * layer.top_k,
        layer.hidden_size,
        layer.intermediate_size,
        layer.num_experts,
        layer.fp8,
    )
    if workspace is None:
        workspace = hidden_states.new_empty(ALIGNMENT + parts.total, dtype=torch.uint8)
    flags = (
        (_INTERLEAVED if layer.gate_up_layout == INTERLEAVED else 0)
        | (0 if layer.gated else _UNGATED)
        | (_WEIGHTS_ON_INPUT if apply_router_weight_on_input else 0)
    )
    device.fused_moe_configured(
        hidden_states,
        w13,
        w2,
        topk_weights,
        topk_ids,
        w13_scale,
        w2_scale,
        a1_scale,
        a2_scale,
        w13_bias,
        w2_bias,
        expert_map,
        addend,
        workspace,
        out,
        list(parts),
        gating(layer.activation, layer.alpha, layer.limit),
        routed_scale,
        first_expert,
        1 if layer.w13_scale is None else layer.w13_scale.n_segments,
        row_format(layer.w13_scale, a1_scale is not None, batch_invariant),
        row_format(layer.w2_scale, a2_scale is not None, batch_invariant),
        flags,
        *kernels,
    )
