"""Problems given by sizes and dtypes alone, held to the ops' own checks and the dispatcher.

Tensors without memory stand for the arguments, so that no rule is written a second time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ext._activations import ACTIVATIONS
from moe_ext._checks import MAX_SIZE, check_grouped_gemm
from moe_ext._combine_checks import check_combine_tokens
from moe_ext._dispatch import choose
from moe_ext._fused_moe_checks import Layer, check_fused_moe
from moe_ext._fused_moe_kernels import choose_kernels
from moe_ext._fused_moe_masked_checks import check_fused_moe_masked
from moe_ext._math import ceil_div
from moe_ext._quantize_checks import check_quantize_fp8
from moe_ext._routing_checks import check_topk_routing
from moe_ext._scales import SCALE_BLOCK
from moe_ext._sort_checks import check_sort_tokens

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_ANY_SM_COUNT = 132  # which kernel there is depends on it, whether there is one does not

Dtype = torch.dtype | str
Shape = tuple[int, ...]
ScaleForm = str | Shape | None


def _tensor(shape: Sequence[int], dtype: Dtype) -> Tensor:
    """Make a tensor without memory."""
    if isinstance(dtype, str):
        if dtype not in _DTYPES:
            raise ValueError(
                f"supports: `dtype` must be torch's or one of {', '.join(_DTYPES)}, got {dtype!r}"
            )
        dtype = _DTYPES[dtype]
    if any(isinstance(size, bool) or not isinstance(size, int) for size in shape):
        raise TypeError(f"supports: sizes must be whole numbers, got {tuple(shape)}")
    if any(size < 0 for size in shape):
        raise ValueError(f"supports: sizes must not be negative, got {tuple(shape)}")
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def layer_scales(
    num_experts: int,
    w13_rows: int,
    hidden_size: int,
    intermediate_size: int,
    w13_scale: ScaleForm,
    w2_scale: ScaleForm,
) -> dict[str, Tensor | None]:
    """Make the scales of a layer's weights that words or shapes stand for."""
    return {
        "w13_scale": _weight_scale(w13_scale, num_experts, w13_rows, hidden_size),
        "w2_scale": _weight_scale(w2_scale, num_experts, hidden_size, intermediate_size),
    }


def _optional(given: bool, shape: Sequence[int]) -> Tensor | None:
    return _tensor(shape, torch.float32) if given else None


def _scale(form: ScaleForm, shapes: dict[str, Shape]) -> Tensor | None:
    """Make the scale that a word or a shape stands for."""
    if form is None:
        return None
    if isinstance(form, str):
        if form not in shapes:
            raise ValueError(
                f"supports: a scale must be None, a shape or one of {', '.join(shapes)}, got "
                f"{form!r}"
            )
        form = shapes[form]
    return _tensor(form, torch.float32)


def _weight_scale(
    form: ScaleForm, groups: int, n: int, k: int, n_segments: int = 1, offset: Shape = (0, 0)
) -> Tensor | None:
    # What is wrong with others the op's checks say.
    segments = n_segments if n_segments in (1, 2) else 1
    n_offset, k_offset = offset if len(offset) == 2 else (0, 0)
    along_n = segments * ceil_div(n // segments + n_offset, SCALE_BLOCK)
    blocks = (groups, along_n, ceil_div(k + k_offset, SCALE_BLOCK))
    return _scale(form, {"tensor": (groups,), "channel": (groups, n), "block": blocks})


def _gemm(
    op: str,
    rows: Shape,
    *,
    dtype: Dtype,
    num_groups: int,
    n: int,
    k: int,
    scale_a: ScaleForm = None,
    scale_b: ScaleForm = None,
    scale_b_offset: Shape = (0, 0),
    n_segments: int = 1,
    bias: bool = False,
    **options: Any,
) -> None:
    by_row = {"tensor": (), "channel": rows, "block": (*rows, ceil_div(k, SCALE_BLOCK))}
    form = check_grouped_gemm(
        op,
        None,
        _tensor((*rows, k), dtype),
        _tensor((num_groups, n, k), dtype),
        _tensor((num_groups,), torch.int32),
        masked=len(rows) == 2,
        scale_a=_scale(scale_a, by_row),
        scale_b=_weight_scale(scale_b, num_groups, n, k, n_segments, scale_b_offset),
        scale_b_offset=scale_b_offset,
        n_segments=n_segments,
        bias=_optional(bias, (num_groups, n)),
        **options,
        has_memory=False,
    )
    num_rows = math.prod(rows)
    if num_rows > MAX_SIZE:
        raise ValueError(f"{op}: `a` must have at most {MAX_SIZE} rows, got {num_rows}")
    for name, size in (("n", n), ("k", k)):
        if size > MAX_SIZE:
            raise ValueError(f"{op}: {name} must be at most {MAX_SIZE}, got {size}")
    choose(
        dtype=form.dtype,
        accumulate=form.accumulate,
        num_rows=num_rows,
        num_groups=num_groups,
        n=n,
        k=k,
    )


def _grouped_gemm(*, num_rows: int, **problem: Any) -> None:
    _gemm("grouped_gemm", (num_rows,), **problem)


def _grouped_gemm_masked(*, num_groups: int, max_rows: int, **problem: Any) -> None:
    _gemm("grouped_gemm_masked", (num_groups, max_rows), num_groups=num_groups, **problem)


class AskedLayer(NamedTuple):
    """A layer given by sizes: what its kernels depend on."""

    layer: Layer
    accumulate: str
    bias: bool
    batch_invariant: bool


def _layer(
    check: Callable[..., Layer],
    op: str,
    rows: Shape,
    routing: tuple[Tensor, ...],
    *,
    dtype: Dtype,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    activation: str = "swiglu",
    w13_scale: ScaleForm = None,
    w2_scale: ScaleForm = None,
    a1_scale: bool = False,
    a2_scale: bool = False,
    w13_bias: bool = False,
    w2_bias: bool = False,
    accumulate: str = "promoted",
    batch_invariant: bool = False,
    **options: Any,
) -> AskedLayer:
    form = ACTIVATIONS.get(activation)
    n = intermediate_size * (2 if form is None or form.gated else 1)
    layer = check(
        op,
        None,
        _tensor((*rows, hidden_size), torch.bfloat16),
        _tensor((num_experts, n, hidden_size), dtype),
        _tensor((num_experts, hidden_size, intermediate_size), dtype),
        *routing,
        **layer_scales(num_experts, n, hidden_size, intermediate_size, w13_scale, w2_scale),
        a1_scale=_optional(a1_scale, ()),
        a2_scale=_optional(a2_scale, ()),
        w13_bias=_optional(w13_bias, (num_experts, n)),
        w2_bias=_optional(w2_bias, (num_experts, hidden_size)),
        activation=activation,
        accumulate=accumulate,
        batch_invariant=batch_invariant,
        **options,
        has_memory=False,
    )
    return AskedLayer(layer, accumulate, bool(w13_bias), bool(batch_invariant))


def asked_fused_moe(
    *, num_tokens: int, top_k: int, hidden_size: int, addend: bool = False, **problem: Any
) -> AskedLayer:
    """Return what a problem of `fused_moe` asks for; raise where it is none, as `CHECKS` do."""
    routing = tuple(_tensor((num_tokens, top_k), kind) for kind in (torch.float32, torch.int32))
    problem |= {"hidden_size": hidden_size, "addend": _optional(addend, (num_tokens, hidden_size))}
    return _layer(check_fused_moe, "fused_moe", (num_tokens,), routing, **problem)


def _fused_moe(**problem: Any) -> None:
    choose_kernels(*asked_fused_moe(**problem), _ANY_SM_COUNT)


def _fused_moe_masked(*, num_experts: int, max_rows: int, **problem: Any) -> None:
    rows, counts = (num_experts, max_rows), _tensor((num_experts,), torch.int32)
    problem["num_experts"] = num_experts
    asked = _layer(check_fused_moe_masked, "fused_moe_masked", rows, (counts,), **problem)
    choose_kernels(*asked, _ANY_SM_COUNT)


def _quantize_fp8(*, dtype: Dtype, shape: Shape, granularity: str, **options: Any) -> None:
    check_quantize_fp8("quantize_fp8", None, _tensor(shape, dtype), granularity, **options)


def _topk_routing(
    *,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    dtype: Dtype = "bf16",
    correction_bias: bool = False,
    **options: Any,
) -> None:
    logits = _tensor((num_tokens, num_experts), dtype)
    options["correction_bias"] = _optional(correction_bias, (num_experts,))
    check_topk_routing("topk_routing", None, logits, top_k, **options)


def _sort_tokens(
    *,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    dtype: torch.dtype = torch.int32,
    **options: Any,
) -> None:
    check_sort_tokens(_tensor((num_tokens, top_k), dtype), num_experts, **options)


def _combine_tokens(
    *, num_tokens: int, top_k: int, hidden_size: int, addend: bool = False, **options: Any
) -> None:
    num_slots = num_tokens * top_k
    check_combine_tokens(
        _tensor((num_slots, hidden_size), torch.bfloat16),
        _tensor((num_slots,), torch.int32),
        _tensor((num_tokens, top_k), torch.float32),
        top_k=top_k,
        addend=_optional(addend, (num_tokens, hidden_size)),
        **options,
        has_memory=False,
    )


CHECKS: dict[str, Callable[..., None]] = {
    "grouped_gemm": _grouped_gemm,
    "grouped_gemm_masked": _grouped_gemm_masked,
    "fused_moe": _fused_moe,
    "fused_moe_masked": _fused_moe_masked,
    "quantize_fp8": _quantize_fp8,
    "topk_routing": _topk_routing,
    "sort_tokens": _sort_tokens,
    "combine_tokens": _combine_tokens,
}
"""By op: raises where the problem is not one, ValueError as the op does, or no kernel takes it."""
