"""A call of the ops behind `fused_moe_mixed`: one C++ op on CUDA, smaller ops on the CPU.

As in `_fused_moe_run.py`: a good call goes to the C++ op at once, and what it refuses by a
ValueError to the checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moe_ext._activations import gating, resolved
from moe_ext._cpu import warn_of_cpu
from moe_ext._fused_moe_checks import check_inputs, check_options
from moe_ext._fused_moe_launch import OWN, REMEMBER, layer_flags
from moe_ext._library import device_kernels
from moe_ext._words import FLOAT_MAX, check_given
from moe_ext.precision._mixed_kernels import choose_mixed_kernels
from moe_ext.precision._mixed_layer import OPERANDS, MixedLayer
from moe_ext.precision._mixed_stages import by_stages


def check_call(
    op: str,
    layer: MixedLayer,
    out: Tensor | None,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
    addend: Tensor | None = None,
    workspace: Tensor | None = None,
    has_memory: bool = True,
) -> None:
    """Raise a ValueError for the first argument that does not fit the layer."""
    check_options(
        op, layer.activation, layer.alpha, layer.limit, layer.gate_up_layout, layer.routed_scale
    )
    check_inputs(
        op,
        out,
        hidden_states,
        topk_weights,
        topk_ids,
        sizes=layer.sizes,
        like=layer.places,
        expert_map=expert_map,
        addend=addend,
        workspace=workspace,
        has_memory=has_memory,
    )


def launch_mixed(
    layer: MixedLayer,
    inputs: tuple[Tensor, Tensor, Tensor],
    expert_map: Tensor | None,
    addend: Tensor | None,
    workspace: Tensor | None,
    out: Tensor | None,
    *,
    checked: bool,
    chosen: tuple[int, ...] = (),
) -> Tensor | None:
    """Launch a CUDA call with tokens, None where it is refused; one that is checked is not.

    What it takes is then told to C++, which remembers it for calls that are not checked. `chosen`
    forces kernels that fit, for this call alone.
    """
    flags = layer_flags(
        layer.activation,
        layer.gate_up_layout,
        layer.apply_router_weight_on_input,
        layer.accumulate,
        layer.batch_invariant,
    )
    alpha, limit = layer.alpha, layer.limit
    # What the C++ op does not look at. Comparisons with a NaN are false.
    if (
        flags is None
        or (alpha is not None and not alpha > 0)
        or (limit is not None and not limit > 0)
        or not abs(layer.routed_scale) <= FLOAT_MAX
    ):
        return None
    device = device_kernels(inputs[0].get_device())
    numbers: tuple[float, ...] = ()
    if checked:
        numbers = tuple(gating(layer.activation, *resolved(layer.activation, alpha, limit)))
        if not chosen:
            chosen = choose_mixed_kernels(layer, inputs[2].numel(), device.sm_count)
            flags |= REMEMBER
    result: Tensor = device.fused_moe_mixed_launch(
        *inputs,
        *layer[: len(OPERANDS) - 1],
        expert_map,
        addend,
        workspace,
        out,
        layer.num_fp8,
        flags,
        OWN if alpha is None else alpha,
        OWN if limit is None else limit,
        layer.routed_scale,
        layer.first_expert if expert_map is None else 0,
        chosen,
        numbers,
    )
    return result


def _implementation(op: str, *, writes_out: bool = False) -> Callable[..., Tensor | None]:
    """Make the implementation of an op for CPU and CUDA."""

    def run(
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *operands: Any,
        out: Tensor | None = None,
        expert_map: Tensor | None = None,
        addend: Tensor | None = None,
        workspace: Tensor | None = None,
        **choices: Any,
    ) -> Tensor | None:
        layer = MixedLayer(*operands, **choices)
        inputs = (hidden_states, topk_weights, topk_ids)
        check_given(op, "hidden_states", hidden_states)
        check_given(op, "topk_weights", topk_weights)
        check_given(op, "topk_ids", topk_ids)
        memory = (expert_map, addend, workspace, out)
        if hidden_states.is_cuda:
            try:
                result = launch_mixed(layer, inputs, *memory, checked=False)
            except ValueError:  # the checks know the documented message
                result = None
            if result is not None:
                return None if writes_out else result
        check_call(
            op, layer, out, *inputs, expert_map=expert_map, addend=addend, workspace=workspace
        )
        if hidden_states.is_cuda:
            device_kernels(hidden_states.get_device())  # says what is missing even without tokens
            if hidden_states.shape[0]:
                result = launch_mixed(layer, inputs, *memory, checked=True)
            else:
                result = hidden_states.new_empty(hidden_states.shape) if out is None else out
        else:
            warn_of_cpu()
            result = by_stages(
                hidden_states, layer, *inputs[1:], expert_map=expert_map, addend=addend
            )
            if out is not None:
                result = out.copy_(result)
        return None if writes_out else result

    return run


run_fused_moe_mixed = _implementation("fused_moe_mixed")
run_fused_moe_mixed_out = _implementation("fused_moe_mixed", writes_out=True)


def fake(*operands: Any, **options: Any) -> Tensor:
    """Say the result's shape, without memory."""
    _check_fake(None, *operands, **options)
    result: Tensor = operands[0].new_empty(operands[0].shape)
    return result


def out_fake(*operands: Any, out: Tensor, **options: Any) -> None:
    """Check a call without memory."""
    _check_fake(out, *operands, **options)


def _check_fake(
    out: Tensor | None,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *operands: Any,
    expert_map: Tensor | None = None,
    addend: Tensor | None = None,
    workspace: Tensor | None = None,
    **choices: Any,
) -> None:
    check_call(
        "fused_moe_mixed",
        MixedLayer(*operands, **choices),
        out,
        hidden_states,
        topk_weights,
        topk_ids,
        expert_map=expert_map,
        addend=addend,
        workspace=workspace,
        has_memory=False,
    )
