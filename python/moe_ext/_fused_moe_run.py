"""A call of `fused_moe`: a good one goes to a C++ op at once, any other to the checks.

The C++ op finds kernels and gating among those it has been told, lays out the workspace, allocates
and launches. It refuses, by a ValueError, what is wrong, what has no token, and problems it has
been told nothing of; all of these are sorted out here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ext._cpu import warn_of_cpu
from moe_ext._fused_moe_checks import check_fused_moe
from moe_ext._fused_moe_launch import launch, launch_checked
from moe_ext._fused_moe_reference import fused_moe_reference
from moe_ext._fused_moe_workspace import workspace_bytes
from moe_ext._library import device_kernels
from moe_ext._words import check_given

_OPERANDS = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")
_CUDA_ONLY = ("accumulate", "batch_invariant", "workspace")


def _check_and_run(op: str, out: Tensor | None, *operands: Tensor, **options: Any) -> Tensor:
    """Run a call on the CPU, or one on CUDA that was refused; `options` are all there are."""
    for name, operand in zip(_OPERANDS, operands, strict=True):
        check_given(op, name, operand)
    layer = check_fused_moe(op, out, *operands, **options)
    hidden_states = operands[0]
    if not hidden_states.is_cuda:
        warn_of_cpu()
        described = {name: value for name, value in options.items() if name not in _CUDA_ONLY}
        result = fused_moe_reference(*operands, **described)
        return result if out is None else out.copy_(result)
    device_kernels(hidden_states.get_device())  # says what is missing even where there is no token
    if out is None:
        out = hidden_states.new_empty(hidden_states.shape)
    if layer.num_tokens:
        if options["workspace"] is None:
            slots = layer.num_tokens * layer.top_k
            sizes = (layer.hidden_size, layer.intermediate_size, layer.num_experts)
            size = workspace_bytes(slots, *sizes)
            options["workspace"] = hidden_states.new_empty(size, dtype=torch.uint8)
        launch_checked(layer, out, *operands, **options)
    return out


def _implementation(op: str, *, writes_out: bool = False) -> Callable[..., Tensor | None]:
    """Make the implementation of an op for CPU and CUDA."""

    # Named, not collected, so that a call does not pack and unpack its options on the way.
    def run(
        hidden_states: Tensor,
        w13: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        out: Tensor | None = None,
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
    ) -> Tensor | None:
        if writes_out and out is None:
            raise ValueError(f"{op}: `out` must be a tensor, got None")
        result = None
        if (
            hidden_states is not None
            and hidden_states.is_cuda
            and w13 is not None
            and w2 is not None
            and topk_weights is not None
            and topk_ids is not None
        ):
            try:
                result = launch(
                    out,
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
                    activation,
                    alpha,
                    limit,
                    gate_up_layout,
                    apply_router_weight_on_input,
                    first_expert,
                    expert_map,
                    addend,
                    routed_scale,
                    accumulate,
                    batch_invariant,
                    workspace,
                )
            except ValueError:  # the checks know the documented message
                result = None
        if result is None:
            result = _check_and_run(
                op,
                out,
                hidden_states,
                w13,
                w2,
                topk_weights,
                topk_ids,
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
                accumulate=accumulate,
                batch_invariant=batch_invariant,
                workspace=workspace,
            )
        return None if writes_out else result

    return run


run_fused_moe = _implementation("fused_moe")
run_fused_moe_out = _implementation("fused_moe_out", writes_out=True)
