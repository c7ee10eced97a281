"""Every documented argument error of `fused_moe`, found on the host before any launch.

What all arguments have to fit is read once, into `Layer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext._activations import ACTIVATIONS, CONCATENATED, GATE_UP_LAYOUTS, resolved
from moe_ext._checks import _bad_stride, _pointer_message, _stride_message
from moe_ext._fused_moe_scales import WeightScale, check_accumulate, check_scales
from moe_ext._fused_moe_workspace import (
    MAX_EXPERTS,
    MAX_SLOTS,
    MAX_TOP_K,
    mixed_workspace_bytes,
    workspace_bytes,
)
from moe_ext._words import check_finite, device_message, name_of

_ALIGNMENT_BYTES = 16
_BF16 = torch.bfloat16
_FP8 = torch.float8_e4m3fn
_BF16_OR_FP32 = (_BF16, torch.float32)
_MULTIPLE = 8  # of hidden and intermediate size: 16 bytes of BF16
_MOST_FEATURES = (
    2**31 - 1 - 2**16
)  # hidden size, gate and up rows: 32 bits, csrc/fused_moe/checks.cpp


class Layer(NamedTuple):
    """What a call without a mistake asks for, defaults filled in."""

    num_tokens: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    fp8: bool
    activation: str
    gated: bool
    alpha: float
    limit: float  # infinite is none
    gate_up_layout: str
    w13_scale: WeightScale | None  # None for BF16
    w2_scale: WeightScale | None


def check_fused_moe(
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
    gate_up_layout: str = CONCATENATED,
    apply_router_weight_on_input: bool = False,  # nothing about it can be wrong
    first_expert: int = 0,
    expert_map: Tensor | None = None,
    addend: Tensor | None = None,
    routed_scale: float = 1.0,
    accumulate: str = "promoted",
    batch_invariant: bool = False,  # nor about this
    workspace: Tensor | None = None,
    has_memory: bool = True,
) -> Layer:
    """Raise a ValueError for the first argument that breaks the contract.

    `has_memory` is False for meta and fake tensors, whose addresses cannot be checked.
    """
    gated = _check_activation(op, activation, alpha, limit, gate_up_layout)
    hidden_size, intermediate_size, num_experts = _check_operands(
        op, hidden_states, w13, w2, gated, ("num_tokens",)
    )
    num_tokens = hidden_states.shape[0]
    top_k = _check_routing(op, hidden_states, topk_weights, topk_ids)
    for argument, tensor in (("hidden_states", hidden_states), ("w13", w13), ("w2", w2)):
        _check_rows(op, argument, tensor, has_memory)
    layouts = check_scales(
        op, w13, w2, w13_scale, w2_scale, a1_scale, a2_scale, gated, gate_up_layout
    )
    _check_biases(op, w13_bias, w2_bias, w13, w2, gated, hidden_states)
    _check_experts(op, first_expert, expert_map, hidden_states)
    if addend is not None:
        form = "(num_tokens, hidden)"
        _check_like(op, "addend", addend, form, (num_tokens, hidden_size), hidden_states)
        _check_rows(op, "addend", addend, has_memory)
    check_finite(op, "routed_scale", routed_scale)
    check_accumulate(op, accumulate, layouts)
    if workspace is not None:
        needed = workspace_bytes(num_tokens * top_k, hidden_size, intermediate_size, num_experts)
        _check_workspace(op, workspace, needed, "fused_moe_workspace_size", hidden_states)
    if out is not None:
        _check_out(op, out, hidden_states, has_memory)
    return Layer(
        num_tokens,
        top_k,
        hidden_size,
        intermediate_size,
        num_experts,
        w13.dtype is _FP8,
        activation,
        gated,
        *resolved(activation, alpha, limit),
        gate_up_layout,
        *layouts,
    )


def check_options(
    op: str,
    activation: str,
    alpha: float | None,
    limit: float | None,
    gate_up_layout: str,
    routed_scale: float,
) -> None:
    """Raise a ValueError for the first option that is none."""
    _check_activation(op, activation, alpha, limit, gate_up_layout)
    check_finite(op, "routed_scale", routed_scale)


def check_inputs(
    op: str,
    out: Tensor | None,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    sizes: tuple[int, int, int],
    like: Tensor,
    expert_map: Tensor | None,
    addend: Tensor | None,
    workspace: Tensor | None,
    has_memory: bool,
) -> None:
    """Raise a ValueError for the first argument that does not fit weights checked elsewhere.

    `sizes` are hidden and intermediate size and the number of experts; `like` is a weight, whose
    device everything has to be on.
    """
    hidden_size = sizes[0]
    if hidden_states.dtype is not _BF16:
        raise ValueError(
            f"{op}: `hidden_states` must be bfloat16, got {name_of(hidden_states.dtype)}"
        )
    if hidden_states.device != like.device:
        raise ValueError(device_message(op, "hidden_states", hidden_states, "bank", like))
    if hidden_states.dim() != 2 or hidden_states.shape[1] != hidden_size:
        raise ValueError(
            f"{op}: `hidden_states` must have shape (num_tokens, hidden) = (*, {hidden_size}), got "
            f"{tuple(hidden_states.shape)}"
        )
    top_k = _check_routing(op, hidden_states, topk_weights, topk_ids)
    _check_rows(op, "hidden_states", hidden_states, has_memory)
    _check_experts(op, 0, expert_map, hidden_states)
    if addend is not None:
        shape = tuple(hidden_states.shape)
        _check_like(op, "addend", addend, "(num_tokens, hidden)", shape, hidden_states)
        _check_rows(op, "addend", addend, has_memory)
    if workspace is not None:
        needed = mixed_workspace_bytes(hidden_states.shape[0], top_k, *sizes)
        _check_workspace(op, workspace, needed, "ExpertBank.workspace_size", hidden_states)
    if out is not None:
        _check_out(op, out, hidden_states, has_memory)


def _check_activation(
    op: str, activation: str, alpha: float | None, limit: float | None, gate_up_layout: str
) -> bool:
    """Return whether `w13` holds gate and up."""
    form = ACTIVATIONS.get(activation)
    if form is None:
        raise ValueError(
            f'{op}: `activation` must be one of {_quoted(ACTIVATIONS)}, got "{activation}"'
        )
    for argument, value, default in (("alpha", alpha, form.alpha), ("limit", limit, form.limit)):
        if value is None:
            continue
        if default is None:
            raise ValueError(
                f'{op}: `{argument}` must be None for the activation "{activation}", got {value}'
            )
        if not value > 0:
            raise ValueError(f"{op}: `{argument}` must be positive, got {value}")
        if argument == "alpha":
            check_finite(op, argument, value)
    if gate_up_layout not in GATE_UP_LAYOUTS:
        raise ValueError(
            f"{op}: `gate_up_layout` must be one of {_quoted(GATE_UP_LAYOUTS)}, got "
            f'"{gate_up_layout}"'
        )
    if not form.gated and gate_up_layout != CONCATENATED:
        raise ValueError(
            f'{op}: `gate_up_layout` must be "{CONCATENATED}" (the default) for the activation '
            f'"{activation}", which has no gate, got "{gate_up_layout}"'
        )
    return form.gated


def _check_operands(
    op: str, hidden_states: Tensor, w13: Tensor, w2: Tensor, gated: bool, rows: tuple[str, ...]
) -> tuple[int, int, int]:
    """Return hidden_size, intermediate_size and num_experts.

    `rows` names all dimensions of `hidden_states` but the last.
    """
    if hidden_states.dtype is not _BF16:
        raise ValueError(
            f"{op}: `hidden_states` must be bfloat16, got {name_of(hidden_states.dtype)}"
        )
    if w13.dtype is not _BF16 and w13.dtype is not _FP8:
        raise ValueError(f"{op}: `w13` must be bfloat16 or float8_e4m3fn, got {name_of(w13.dtype)}")
    if w2.dtype is not w13.dtype:
        raise ValueError(
            f"{op}: `w2` must be {name_of(w13.dtype)} to match `w13`, got {name_of(w2.dtype)}"
        )
    for argument, tensor in (("w13", w13), ("w2", w2)):
        if tensor.device != hidden_states.device:
            raise ValueError(device_message(op, argument, tensor, "hidden_states", hidden_states))
    if hidden_states.dim() != len(rows) + 1:
        raise ValueError(
            f"{op}: `hidden_states` must have shape ({', '.join(rows)}, hidden), got "
            f"{tuple(hidden_states.shape)}"
        )
    hidden_size = hidden_states.shape[-1]
    if w2.dim() != 3 or w2.shape[1] != hidden_size:
        raise ValueError(
            f"{op}: `w2` must have shape (num_experts, hidden, intermediate) = (*, {hidden_size}, "
            f"*) to match `hidden_states`, got {tuple(w2.shape)}"
        )
    num_experts, _, intermediate_size = w2.shape
    n = 2 * intermediate_size if gated else intermediate_size
    if w13.shape != (num_experts, n, hidden_size):
        form = "2 * intermediate" if gated else "intermediate"
        raise ValueError(
            f"{op}: `w13` must have shape (num_experts, {form}, hidden) = "
            f"{(num_experts, n, hidden_size)} to match `w2` and `hidden_states`, got "
            f"{tuple(w13.shape)}"
        )
    if not 0 < num_experts <= MAX_EXPERTS:
        raise ValueError(f"{op}: `w13` must have 1 to {MAX_EXPERTS} experts, got {num_experts}")
    for argument, name, size, most in (
        ("hidden_states", "hidden", hidden_size, _MOST_FEATURES),
        ("w2", "intermediate", intermediate_size, _MOST_FEATURES // 2),
    ):
        if size == 0 or size % _MULTIPLE:
            raise ValueError(
                f"{op}: `{argument}` must have a positive {name} size that is a multiple of "
                f"{_MULTIPLE}, got {size}"
            )
        if size > most:
            raise ValueError(f"{op}: `{argument}` must have {name} size at most {most}, got {size}")
    return hidden_size, intermediate_size, num_experts


def _check_biases(
    op: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    w13: Tensor,
    w2: Tensor,
    gated: bool,
    hidden_states: Tensor,
) -> None:
    if w13_bias is not None:
        form = "(num_experts, 2 * intermediate)" if gated else "(num_experts, intermediate)"
        _check_like(op, "w13_bias", w13_bias, form, tuple(w13.shape[:2]), hidden_states)
    if w2_bias is not None:
        form = "(num_experts, hidden)"
        _check_like(op, "w2_bias", w2_bias, form, tuple(w2.shape[:2]), hidden_states)


def _check_routing(op: str, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> int:
    """Return top_k."""
    if topk_weights.dtype not in _BF16_OR_FP32:
        raise ValueError(
            f"{op}: `topk_weights` must be bfloat16 or float32, got {name_of(topk_weights.dtype)}"
        )
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: `topk_ids` must be int32 or int64, got {name_of(topk_ids.dtype)}")
    num_tokens = hidden_states.shape[0]
    if topk_ids.dim() != 2 or topk_ids.shape[0] != num_tokens:
        raise ValueError(
            f"{op}: `topk_ids` must have shape (num_tokens, top_k) = ({num_tokens}, *) to match "
            f"`hidden_states`, got {tuple(topk_ids.shape)}"
        )
    top_k = topk_ids.shape[1]
    if not 0 < top_k <= MAX_TOP_K:
        raise ValueError(f"{op}: `topk_ids` must have 1 to {MAX_TOP_K} columns, got {top_k}")
    if num_tokens * top_k > MAX_SLOTS:
        raise ValueError(
            f"{op}: `topk_ids` must have at most {MAX_SLOTS} elements, got {num_tokens * top_k} "
            f"for shape {tuple(topk_ids.shape)}"
        )
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"{op}: `topk_weights` must have the shape {tuple(topk_ids.shape)} of `topk_ids`, got "
            f"{tuple(topk_weights.shape)}"
        )
    for argument, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        if tensor.device != hidden_states.device:
            raise ValueError(device_message(op, argument, tensor, "hidden_states", hidden_states))
    if top_k > 1 and topk_ids.stride()[1] != 1:
        raise ValueError(
            f"{op}: `topk_ids` must have a contiguous last dimension, got strides "
            f"{topk_ids.stride()} for shape {tuple(topk_ids.shape)}"
        )
    return top_k


def _check_rows(op: str, argument: str, tensor: Tensor, has_memory: bool) -> None:
    """Raise a ValueError unless rows are dense and begin at multiples of 16 bytes."""
    if tensor.numel() == 0:  # strides mean nothing
        return
    row_elems, item_bytes = tensor.shape[-1], tensor.itemsize
    *outer, inner = tensor.stride()
    if inner != 1 or any(
        size > 1 and _bad_stride(stride, row_elems, item_bytes)
        for size, stride in zip(tensor.shape, outer, strict=False)
    ):
        raise ValueError(_stride_message(op, argument, tensor, row_elems, item_bytes))
    if has_memory and tensor.data_ptr() % _ALIGNMENT_BYTES:
        raise ValueError(_pointer_message(op, argument, tensor))


def _check_like(
    op: str,
    argument: str,
    tensor: Tensor,
    form: str,
    shape: tuple[int, ...],
    hidden_states: Tensor,
) -> None:
    if tensor.dtype not in _BF16_OR_FP32:
        raise ValueError(
            f"{op}: `{argument}` must be bfloat16 or float32, got {name_of(tensor.dtype)}"
        )
    if tensor.device != hidden_states.device:
        raise ValueError(device_message(op, argument, tensor, "hidden_states", hidden_states))
    if tensor.shape != shape:
        raise ValueError(
            f"{op}: `{argument}` must have shape {form} = {shape}, got {tuple(tensor.shape)}"
        )


def _check_experts(
    op: str, first_expert: int, expert_map: Tensor | None, hidden_states: Tensor
) -> None:
    if not 0 <= first_expert < 2**31:
        raise ValueError(f"{op}: `first_expert` must be in [0, 2^31), got {first_expert}")
    if expert_map is None:
        return
    if first_expert != 0:
        raise ValueError(
            f"{op}: `first_expert` must be 0 where `expert_map` is given, got {first_expert}"
        )
    if expert_map.dtype is not torch.int32:
        raise ValueError(f"{op}: `expert_map` must be int32, got {name_of(expert_map.dtype)}")
    if expert_map.device != hidden_states.device:
        raise ValueError(
            device_message(op, "expert_map", expert_map, "hidden_states", hidden_states)
        )
    if expert_map.dim() != 1 or expert_map.numel() == 0:
        raise ValueError(
            f"{op}: `expert_map` must have shape (num_global_experts,), at least (1,), got "
            f"{tuple(expert_map.shape)}"
        )
    if not expert_map.is_contiguous():
        raise ValueError(
            f"{op}: `expert_map` must be contiguous, got stride {expert_map.stride()[0]}"
        )


def _check_workspace(
    op: str, workspace: Tensor, needed: int, size_function: str, hidden_states: Tensor
) -> None:
    if workspace.device != hidden_states.device:
        raise ValueError(device_message(op, "workspace", workspace, "hidden_states", hidden_states))
    if not workspace.is_contiguous():
        raise ValueError(
            f"{op}: `workspace` must be contiguous, got strides {workspace.stride()} for shape "
            f"{tuple(workspace.shape)}"
        )
    size = workspace.numel() * workspace.itemsize
    if size < needed:
        raise ValueError(
            f"{op}: `workspace` must have at least {needed} bytes ({size_function}), got {size}"
        )


def _check_out(op: str, out: Tensor, hidden_states: Tensor, has_memory: bool) -> None:
    if out.dtype is not hidden_states.dtype:
        raise ValueError(
            f"{op}: `out` must be {name_of(hidden_states.dtype)} to match `hidden_states`, got "
            f"{name_of(out.dtype)}"
        )
    if out.device != hidden_states.device:
        raise ValueError(device_message(op, "out", out, "hidden_states", hidden_states))
    if out.shape != hidden_states.shape:
        raise ValueError(
            f"{op}: `out` must have the shape {tuple(hidden_states.shape)} of `hidden_states`, "
            f"got {tuple(out.shape)}"
        )
    _check_rows(op, "out", out, has_memory)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
