"""What `fused_moe_masked` must compute: `fused_moe_reference` on the rows that count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ext._fused_moe_reference import fused_moe_reference
from moe_ext._reference_mode import without_autocast


@without_autocast
def fused_moe_masked_reference(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    counts: Tensor,
    *,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Run experts on their buffers as `moe_ext.fused_moe_masked` does, on their device.

    Each row that counts is a token of `fused_moe_reference` that has chosen one expert, with the
    weight 1.

    Args:
        hidden_states: as in `fused_moe_masked`, like all arguments but the last two.
        w13: see `fused_moe_masked`.
        w2: see `fused_moe_masked`.
        counts: see `fused_moe_masked`; read back, so this synchronises.
        out: (num_experts, max_rows, hidden), any strides, whose rows from counts[e] on stay as they
            are; or None for a new tensor.
        options: scales, biases, the activation and its options, and `gate_up_gemm`, as in
            `fused_moe_reference`.

    Returns:
        (num_experts, max_rows, hidden), bfloat16; `out` if it is given.
    """
    if out is None:
        out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    rows = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    expert, row = (rows < counts[:, None]).nonzero(as_tuple=True)
    ones = torch.ones(expert.shape[0], 1, dtype=torch.float32, device=expert.device)
    out[expert, row] = fused_moe_reference(
        hidden_states[expert, row],
        w13,
        w2,
        ones,
        expert[:, None],
        **options,
    )
    return out
