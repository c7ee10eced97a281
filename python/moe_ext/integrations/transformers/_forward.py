"""The function that Transformers calls in place of the forward of a module of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ext.fused_moe import fused_moe
from moe_ext.integrations.transformers._gates import gate_of, remembered_gate
from moe_ext.integrations.transformers._pack import (
    check_format,
    packed_weights,
    weight_names,
    weight_scale,
)


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the experts of a module.

    Args:
        self: a module of experts decorated with Transformers' `use_experts_implementation`, or its
            `FP8Experts`.
        hidden_states: (num_tokens, hidden), any floating dtype; rounded to bfloat16.
        top_k_index: (num_tokens, top_k), int32 or int64; ids outside the experts that are here,
            such as expert parallelism's sentinel, contribute nothing.
        top_k_weights: (num_tokens, top_k), or (num_tokens, num_experts) with the weight of each
            expert; any floating dtype.

    Returns:
        (num_tokens, hidden), the dtype of `hidden_states`.

    Raises:
        ValueError: the module's activation, dtype or scales are none of `fused_moe`'s.
        RuntimeError: the module would have to be packed or checked while torch.compile traces or
            a CUDA graph is captured.
    """
    gate = remembered_gate(self)
    if gate is None:
        check_format(self)
        gate = gate_of(self)
    w13, w2 = packed_weights(self)
    up_name, down_name = weight_names(self)
    has_bias = self.has_bias
    out = fused_moe(
        hidden_states.to(torch.bfloat16),
        w13,
        w2,
        weights_of(top_k_index, top_k_weights),
        top_k_index,
        w13_scale=weight_scale(self, up_name, w13),
        w2_scale=weight_scale(self, down_name, w2),
        w13_bias=getattr(self, f"{up_name}_bias") if has_bias else None,
        w2_bias=getattr(self, f"{down_name}_bias") if has_bias else None,
        activation=gate.activation,
        alpha=gate.alpha,
        limit=gate.limit,
        gate_up_layout=gate.gate_up_layout,
    )
    return out.to(hidden_states.dtype)


def weights_of(ids: Tensor, weights: Tensor) -> Tensor:
    """Return (num_tokens, top_k) weights, bfloat16 or float32."""
    if weights.shape[-1] != ids.shape[-1]:
        # Sentinels have no column; what is gathered for them is dropped with them.
        weights = weights.gather(1, ids.long().clamp(0, weights.shape[-1] - 1))
    return weights if weights.dtype is torch.bfloat16 else weights.float()
