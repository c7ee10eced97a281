"""The C++ ops behind `fused_moe` on CUDA, and what Python tells them."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from moe_ext._activations import ACTIVATIONS, CONCATENATED, INTERLEAVED, gating
from moe_ext._dispatch_measured import Measured
from moe_ext._dispatch_table_layer import LAYER_TABLES
from moe_ext._fused_moe_checks import Layer
from moe_ext._fused_moe_kernels import Kernels, choose_kernels, rule_of
from moe_ext._library import DeviceKernels, device_kernels
from moe_ext._words import FLOAT_MAX

# Bits of the C++ ops' `flags`, twins of LayerFlag, csrc/fused_moe/op.hpp.
_INTERLEAVED, _UNGATED, _WEIGHTS_ON_INPUT, _FAST, _BATCH_INVARIANT, REMEMBER = (
    1 << bit for bit in range(6)
)
# Above the bits the activation's number, by which C++ tells one from another.
_ACTIVATION_SHIFT = 8
_ACTIVATION_FLAGS = {
    name: (number << _ACTIVATION_SHIFT) | (0 if form.gated else _UNGATED)
    for number, (name, form) in enumerate(ACTIVATIONS.items())
}
_NO_RULE = (-1, 0)
OWN = 0.0  # as alpha or limit: the activation's own


def layer_flags(
    activation: str,
    gate_up_layout: str,
    apply_router_weight_on_input: bool,
    accumulate: str,
    batch_invariant: bool,
) -> int | None:
    """Put options into one number, None where one of them has a value that is none."""
    flags = _ACTIVATION_FLAGS.get(activation)
    if flags is None:
        return None
    if gate_up_layout != CONCATENATED:
        if gate_up_layout != INTERLEAVED:
            return None
        flags |= _INTERLEAVED
    if apply_router_weight_on_input:
        flags |= _WEIGHTS_ON_INPUT
    if accumulate != "promoted":
        if accumulate != "fast":
            return None
        flags |= _FAST
    return flags | _BATCH_INVARIANT if batch_invariant else flags


def teach(kernels: DeviceKernels) -> None:
    """Teach C++ all tables that layers' kernels are chosen by."""
    for table in LAYER_TABLES.values():
        _number_of(table, kernels.fused_moe_teach)


@functools.cache
def _number_of(table: Measured, teach: Callable[..., None]) -> int:
    """Return the number by which C++ knows a table, which it is taught the first time."""
    number = list(LAYER_TABLES.values()).index(table)
    teach(number, *table.taught(), *table.limits)
    return number


def launch(
    out: Tensor | None,
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    a1_scale: Tensor | None,
    a2_scale: Tensor | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    activation: str,
    alpha: float | None,
    limit: float | None,
    gate_up_layout: str,
    apply_router_weight_on_input: bool,
    first_expert: int,
    expert_map: Tensor | None,
    addend: Tensor | None,
    routed_scale: float,
    accumulate: str,
    batch_invariant: bool,
    workspace: Tensor | None,
) -> Tensor | None:
    """Launch a CUDA call that nothing has been checked of.

    The C++ op checks all that memory safety depends on and the rest of the contract, so a good call
    pays for one check. Raises its ValueError, or returns None, for a call that is refused.
    """
    flags = layer_flags(
        activation, gate_up_layout, apply_router_weight_on_input, accumulate, batch_invariant
    )
    if flags is None:
        return None
    kernels = device_kernels(hidden_states.get_device())
    # Two ops and as few arguments as will do: torch takes up to 0.3 us to read one.
    if (
        w13_bias is None
        and w2_bias is None
        and a1_scale is None
        and a2_scale is None
        and alpha is None
        and limit is None
        and first_expert == 0
        and expert_map is None
        and addend is None
        and routed_scale == 1
    ):
        result: Tensor = kernels.fused_moe_launch(
            hidden_states,
            w13,
            w2,
            topk_weights,
            topk_ids,
            w13_scale,
            w2_scale,
            workspace,
            out,
            flags,
        )
        return result
    # What the C++ op does not look at. Comparisons with a NaN are false.
    if (alpha is not None and not alpha > 0) or (limit is not None and not limit > 0):
        return None
    if not abs(routed_scale) <= FLOAT_MAX:
        return None
    result = kernels.fused_moe_launch_with(
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
        flags,
        OWN if alpha is None else alpha,
        OWN if limit is None else limit,
        routed_scale,
        first_expert,
    )
    return result


def launch_checked(
    layer: Layer,
    out: Tensor,
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
    activation: str,
    alpha: float | None,
    limit: float | None,
    gate_up_layout: str,
    apply_router_weight_on_input: bool,
    first_expert: int,
    expert_map: Tensor | None,
    addend: Tensor | None,
    routed_scale: float,
    accumulate: str,
    batch_invariant: bool,
    workspace: Tensor,
    chosen: Kernels | None = None,
) -> None:
    """Launch a CUDA call with tokens that has passed the checks, and tell C++ what it takes.

    It is told, too, what that was chosen by, so that it need not ask for another number of tokens.
    `chosen` forces kernels that fit, for this call alone. Raises what only the C++ op looks at,
    such as the limits of TMA.
    """
    kernels = device_kernels(hidden_states.get_device())
    flags = layer_flags(
        activation, gate_up_layout, apply_router_weight_on_input, accumulate, batch_invariant
    )
    assert flags is not None  # the checks know the same options
    rule = _NO_RULE
    if chosen is None:
        options = accumulate, w13_bias is not None, batch_invariant, kernels.sm_count
        chosen = choose_kernels(layer, *options)
        by = rule_of(layer, *options)
        if by is not None:
            rule = _number_of(by[0], kernels.fused_moe_teach), by[1]
        flags |= REMEMBER
    kernels.fused_moe_configured(
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
        flags,
        OWN if alpha is None else alpha,
        OWN if limit is None else limit,
        routed_scale,
        first_expert,
        *chosen,
        gating(activation, layer.alpha, layer.limit),
        *rule,
    )
