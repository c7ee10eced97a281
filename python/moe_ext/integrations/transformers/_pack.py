"""Weights of experts as `fused_moe` takes them: K contiguous, rows of 16 bytes, float32 scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_ext._math import ceil_div
from moe_ext.integrations.transformers._gates import recording
from moe_ext.scales import pad_rows, scales_to_float32

BLOCK = 128
_ROW_BYTES = 16
_MULTIPLE = 8  # of hidden and intermediate size, as `fused_moe` has them
# What a later Transformers than 5.17 says of experts that run otherwise.
_LATER_TRAITS = ("has_post_expert_norm",)


def is_experts(module: nn.Module) -> bool:
    """Whether Transformers sends the calls of a module through its registry."""
    return hasattr(module, "is_concatenated") and hasattr(module, "down_proj")


def weight_names(module: Any) -> tuple[str, str]:
    """Return the names of the two weights."""
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def k_major(module: Any, weight: Tensor) -> Tensor:
    """Return a weight as (num_experts, n, k), a view."""
    return weight.transpose(1, 2) if module.is_transposed else weight


def check_format(module: Any) -> None:
    """Raise a ValueError unless form, dtypes, scales and sizes are such as `fused_moe` has."""
    name = type(module).__name__
    for trait in _LATER_TRAITS:  # by name: torch.compile may be tracing this
        if getattr(module, trait, False):
            raise ValueError(f"moe_ext: {trait} of {name} must be False, got True")
    for weight_name in weight_names(module):
        weight = getattr(module, weight_name)
        if weight.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
            raise ValueError(
                f"moe_ext: {weight_name} of {name} must be bfloat16 or float8_e4m3fn, got "
                f"{str(weight.dtype).removeprefix('torch.')}"
            )
        if any(size % _MULTIPLE for size in weight.shape[1:]):
            raise ValueError(
                f"moe_ext: {weight_name} of {name} must have sizes that are multiples of "
                f"{_MULTIPLE}, got shape {tuple(weight.shape)}"
            )
    if module.down_proj.dtype is torch.float8_e4m3fn:
        if module.activation_scheme != "dynamic":
            raise ValueError(
                f"moe_ext: activation_scheme of {name} must be 'dynamic', got "
                f"{module.activation_scheme!r}"
            )
        if module.block_size is not None and tuple(module.block_size) != (BLOCK, BLOCK):
            raise ValueError(
                f"moe_ext: block_size of {name} must be (128, 128) or None, got {module.block_size}"
            )


def packed_weights(module: Any) -> tuple[Tensor, Tensor]:
    """Return the two weights as `fused_moe` takes them, packing them where they need to be.

    Raises:
        RuntimeError: they would have to be packed while that cannot be done.
    """
    up_name, down_name = weight_names(module)
    w13 = k_major(module, getattr(module, up_name))
    w2 = k_major(module, getattr(module, down_name))
    if _rows_fit(w13) and _rows_fit(w2) and (w2.dtype is torch.bfloat16 or _scales_fit(module)):
        return w13, w2
    if torch.compiler.is_compiling() or recording(w2):
        raise RuntimeError(
            f"moe_ext: the weights of {type(module).__name__} must be packed before torch.compile "
            "or a CUDA graph, by moe_ext.integrations.transformers.register(model) or by one "
            "eager call"
        )
    check_format(module)
    pack(module)
    return k_major(module, getattr(module, up_name)), k_major(module, getattr(module, down_name))


def _scales_fit(module: Any) -> bool:
    scales = (getattr(module, f"{name}_scale_inv", None) for name in weight_names(module))
    return all(scale is not None and scale.dtype is torch.float32 for scale in scales)


def _rows_fit(weight: Tensor) -> bool:
    """Whether rows are contiguous and 16-byte aligned; addresses are unknown to torch.compile."""
    expert, row, column = weight.stride()
    if column != 1 or (expert | row) * weight.itemsize % _ROW_BYTES:
        return False
    return torch.compiler.is_compiling() or weight.data_ptr() % _ROW_BYTES == 0


def pack(module: Any) -> None:
    """Give weights strides that fit; names, shapes and values of the parameters stay."""
    # A tensor made in inference mode could not be changed outside it later on.
    with torch.inference_mode(False), torch.no_grad():
        for name in weight_names(module):
            parameter = getattr(module, name)
            given = k_major(module, parameter.data)
            packed = pad_rows(given)
            if packed is not given:
                parameter.data = k_major(module, packed)
            scale = getattr(module, f"{name}_scale_inv", None)
            if scale is not None and scale.dtype is not torch.float32:
                values = scales_to_float32(scale.data)
                setattr(module, f"{name}_scale_inv", nn.Parameter(values, requires_grad=False))


def weight_scale(module: Any, name: str, weight: Tensor) -> Tensor | None:
    """Return the scale of a weight in a shape by which `fused_moe` knows its layout."""
    if weight.dtype is torch.bfloat16:
        return None
    scale: Tensor = getattr(module, f"{name}_scale_inv")
    num_experts, n, k = weight.shape
    if module.block_size is None:  # one for each matrix: gate, up, down
        parts = scale.shape[1]
        if parts == 1:
            return scale.reshape(num_experts)
        return scale.expand(num_experts, parts, n // parts).reshape(num_experts, n)
    blocks = ceil_div(n // 2, BLOCK) * 2
    if name == "gate_up_proj" and scale.shape[1] == blocks != ceil_div(n, BLOCK):
        return scale.reshape(num_experts, 2, blocks // 2, ceil_div(k, BLOCK))
    return scale
