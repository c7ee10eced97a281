"""vLLM's words for quantised experts, in its flags or in its object, as `fused_moe`'s scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ext._math import ceil_div

BLOCK = 128
_OP = "fused_experts"
# Formats without kernels here: flags of a call, or properties of a quant_config.
REFUSED_FLAGS = (
    *("use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "use_int4_w4a8"),
    *("use_mxfp4_w4a4", "use_mxfp4_w4a8", "use_mxfp4_w4a16", "use_nvfp4_w4a4", "use_nvfp4_w4a16"),
    *("use_mxfp8_w8a8", "use_mxfp8_w8a16", "use_fp8_w8a16", "ocp_mx_scheme"),
)
_REFUSED_TENSORS = (
    *("w1_zp", "w2_zp", "a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas"),
    *("a1_scale_2", "a2_scale_2"),
)
_TENSORS = ("w1_scale", "w2_scale", "a1_scale", "a2_scale", "w1_bias", "w2_bias")


class Quantization(NamedTuple):
    """What is said of one call; scales in vLLM's shapes."""

    use_fp8_w8a8: bool = False
    per_channel: bool = False
    block_shape: tuple[int, ...] | None = None
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    a1_scale: Tensor | None = None
    a2_scale: Tensor | None = None
    w1_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    alpha: float | None = None
    limit: float | None = None


def refuse(flags: dict[str, Any], where: str) -> None:
    """Raise a ValueError for the first of the formats that is asked for."""
    for name, value in flags.items():
        # A tensor must not be asked for its truth.
        if value is not None and value is not False:
            raise ValueError(f"{_OP}: `{name}`{where} must be None or False, got {_said(value)}")


def from_config(config: Any) -> Quantization:
    """Read a `FusedMoEQuantConfig`, or anything with its properties."""
    where = " of quant_config"
    refuse({name: getattr(config, name, None) for name in REFUSED_FLAGS + _REFUSED_TENSORS}, where)
    beta = getattr(config, "gemm1_beta", None)
    if beta not in (None, 1.0):
        raise ValueError(f"{_OP}: `gemm1_beta`{where} must be None or 1, got {beta!r}")
    known = ("use_fp8_w8a8", "block_shape", *_TENSORS, *REFUSED_FLAGS)
    if not any(hasattr(config, name) for name in known):
        raise ValueError(
            f"{_OP}: `quant_config` must have the properties of vLLM's FusedMoEQuantConfig, got "
            f"{type(config).__name__}"
        )
    block_shape = getattr(config, "block_shape", None)
    return Quantization(
        use_fp8_w8a8=bool(getattr(config, "use_fp8_w8a8", False)),
        per_channel=bool(
            getattr(config, "per_act_token_quant", False)
            or getattr(config, "per_out_ch_quant", False)
        ),
        block_shape=None if block_shape is None else tuple(block_shape),
        alpha=getattr(config, "gemm1_alpha", None),
        limit=getattr(config, "gemm1_clamp_limit", None),
        **{name: getattr(config, name, None) for name in _TENSORS},
    )


def scales(said: Quantization, w1: Tensor, w2: Tensor, gated: bool) -> dict[str, Any]:
    """Return the arguments of `fused_moe`, checked against the flags.

    Raises:
        ValueError: weights are FP8 and the flags say otherwise, or the reverse; a scale has not the
            layout that the flags say.
    """
    is_fp8 = w1.dtype is torch.float8_e4m3fn
    if said.use_fp8_w8a8 is not is_fp8:
        raise ValueError(
            f"{_OP}: `use_fp8_w8a8` must be {is_fp8} for `w1` of "
            f"{str(w1.dtype).removeprefix('torch.')}, got {said.use_fp8_w8a8}"
        )
    given = (said.w1_scale, said.w2_scale, said.a1_scale, said.a2_scale)
    if not is_fp8:
        names = ("w1_scale", "w2_scale", "a1_scale", "a2_scale", "block_shape", "per_channel_quant")
        values = (*given, said.block_shape, said.per_channel or None)
        for name, value in zip(names, values, strict=True):
            if value is not None:
                raise ValueError(
                    f"{_OP}: `{name}` must be None for bfloat16 weights, got {_said(value)}"
                )
        return {}
    if said.block_shape is not None and said.block_shape != (BLOCK, BLOCK):
        raise ValueError(
            f"{_OP}: `block_shape` must be [128, 128] or None, got {list(said.block_shape)}"
        )
    return {
        "w13_scale": _weight_scale("w1_scale", said.w1_scale, said, w1, gated),
        "w2_scale": _weight_scale("w2_scale", said.w2_scale, said, w2, False),
        "a1_scale": None if said.a1_scale is None else said.a1_scale.reshape(-1),
        "a2_scale": None if said.a2_scale is None else said.a2_scale.reshape(-1),
    }


def _weight_scale(
    name: str, scale: Tensor | None, said: Quantization, weight: Tensor, halves: bool
) -> Tensor:
    if scale is None:
        raise ValueError(f"{_OP}: `{name}` must be a tensor for FP8 weights, got None")
    num_experts, n, k = weight.shape
    shape = tuple(scale.shape)
    if said.block_shape is not None:
        columns, own = ceil_div(k, BLOCK), ceil_div(n // 2, BLOCK)
        if shape == (num_experts, ceil_div(n, BLOCK), columns):
            return scale
        if halves and shape == (num_experts, 2 * own, columns):  # gate and up begin blocks
            return scale.reshape(num_experts, 2, own, columns)
        expected = f"({num_experts}, {ceil_div(n, BLOCK)}, {columns})"
    elif said.per_channel:
        if shape in ((num_experts, n), (num_experts, n, 1)):
            return scale
        expected = f"({num_experts}, {n}) or ({num_experts}, {n}, 1)"
    else:
        if shape in ((), (1,), (num_experts,), (num_experts, 1), (num_experts, 1, 1)):
            return scale.reshape(-1)
        expected = f"({num_experts},)"
    raise ValueError(f"{_OP}: `{name}` must have shape {expected}, got {shape}")


def _said(value: Any) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
