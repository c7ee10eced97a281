"""A call of `fused_moe`: checked, then the kernels on CUDA or the reference on the CPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_ext._cpu import warn_of_cpu
from moe_ext._fused_moe_checks import check_fused_moe
from moe_ext._fused_moe_launch import _launch_fused_moe
from moe_ext._fused_moe_reference import fused_moe_reference
from moe_ext._library import device_kernels

_OPERANDS = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")


def _run(
    op: str,
    out: Tensor | None,
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "swiglu",
    alpha: float | None = None,
    limit: float | None = None,
    gate_up_layout: str = "concatenated",
    apply_router_weight_on_input: bool = False,
    first_expert: int = 0,
    expert_map: Tensor | None = None,
    addend: Tensor | None = None,
    routed_scale: float = 1.0,
    accumulate: str = "promoted",
    batch_invariant: bool = False,
    workspace: Tensor | None = None,
) -> Tensor:
    operands = (hidden_states, w13, w2, topk_weights, topk_ids)
    for name, operand in zip(_OPERANDS, operands, strict=True):
        if operand is None:
            raise ValueError(f"{op}: `{name}` must be a tensor, got None")
    layer = check_fused_moe(
        op,
        out,
        *operands,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        activation=activation,
        alpha=alpha,
        limit=limit,
        gate_up_layout=gate_up_layout,
        first_expert=first_expert,
        expert_map=expert_map,
        addend=addend,
        accumulate=accumulate,
        workspace=workspace,
    )
    if not hidden_states.is_cuda:
        warn_of_cpu()
        result = fused_moe_reference(
            *operands,
            w13_scale=w13_scale,
            w2_scale=w2_scale,
            a1_scale=a1_scale,
            a2_scale=a2_scale,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            activation=activation,
            alpha=alpha,
            limit=limit,
            gate_up_layout=gate_up_layout,
            apply_router_weight_on_input=apply_router_weight_on_input,
            first_expert=first_expert,
            expert_map=expert_map,
            addend=addend,
            routed_scale=routed_scale,
        )
        return result if out is None else out.copy_(result)
    device_kernels(hidden_states.get_device())  # says what is missing even where there is no token
    if out is None:
        out = hidden_states.new_empty(hidden_states.shape)
    if layer.num_tokens:
        _launch_fused_moe(
            out,
            layer,
            *operands,
            w13_scale=w13_scale,
            w2_scale=w2_scale,
            a1_scale=a1_scale,
            a2_scale=a2_scale,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            apply_router_weight_on_input=apply_router_weight_on_input,
            first_expert=first_expert,
            expert_map=expert_map,
            addend=addend,
            routed_scale=routed_scale,
            accumulate=accumulate,
            batch_invariant=batch_invariant,
            workspace=workspace,
        )
    return out


def run_fused_moe(*operands: Tensor, **options: Any) -> Tensor:
    """Implement `moe_ext::fused_moe` for CPU and CUDA."""
    return _run("fused_moe", None, *operands, **options)


def run_fused_moe_out(*operands: Tensor, out: Tensor, **options: Any) -> None:
    """Implement `moe_ext::fused_moe_out` for CPU and CUDA."""
    if out is None:
        raise ValueError("fused_moe_out: `out` must be a tensor, got None")
    _run("fused_moe_out", out, *operands, **options)
