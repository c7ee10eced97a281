"""The chain of kernels behind `fused_moe` on CUDA."""

from __future__ import annotations

from torch import Tensor

from moe_ext._fused_moe_checks import Layer


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
    raise NotImplementedError(
        f"fused_moe: `hidden_states` must be on the CPU, since the layer's CUDA kernels are not "
        f"chained together yet, got {hidden_states.device}"
    )
