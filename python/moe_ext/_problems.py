"""Problems given by sizes and dtypes alone, held to the ops' own checks and the dispatcher.

Tensors without memory stand for the arguments, so that no rule is written a second time: the checks
say what is wrong with a value, calls of the ops what torch cannot hold. Values of another kind are
refused before (`_problem_parts.py`).
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
from moe_ext.combine_tokens import combine_tokens
from moe_ext.fused_moe import fused_moe
from moe_ext.fused_moe_masked import fused_moe_masked
from moe_ext.grouped_gemm import grouped_gemm
from moe_ext.grouped_gemm_masked import grouped_gemm_masked
from moe_ext.quantize import quantize_fp8
from moe_ext.routing import topk_routing
from moe_ext.sort_tokens import sort_tokens

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_OPERANDS = ("bf16", "fp8")  # what GEMMs and layers take
_FLOATING = ("bf16", "fp16", "fp32")  # what is quantised or routed by
_MAX_ELEMENTS = 2**59  # torch counts bytes in 64 bits, and strides of empty tensors too
_ANY_SM_COUNT = 132  # which kernel there is depends on it, whether there is one does not

Dtype = torch.dtype | str
Shape = tuple[int, ...]
ScaleForm = str | Shape | None


def _torch_dtype(dtype: Dtype, taken: Sequence[str] = tuple(_DTYPES)) -> torch.dtype:
    """Return torch's; `taken` is what the message lists. Others that are known the op refuses."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    raise ValueError(
        f"supports: `dtype` must be torch's or one of {', '.join(taken)}, got {dtype!r}"
    )


def _tensor(shape: Sequence[int], dtype: Dtype) -> Tensor:
    """Make a tensor without memory."""
    if any(size < 0 for size in shape):
        raise ValueError(f"supports: sizes must not be negative, got {tuple(shape)}")
    if math.prod(shape) >= _MAX_ELEMENTS or max(shape, default=0) >= _MAX_ELEMENTS:
        raise ValueError(
            f"supports: sizes must make tensors of less than 2^59 elements, got {tuple(shape)}"
        )
    return torch.empty(tuple(shape), dtype=_torch_dtype(dtype), device="meta")


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
        "w13_scale": _weight_scale("w13_scale", w13_scale, num_experts, w13_rows, hidden_size),
        "w2_scale": _weight_scale(
            "w2_scale", w2_scale, num_experts, hidden_size, intermediate_size
        ),
    }


def _optional(given: bool | None, shape: Sequence[int]) -> Tensor | None:
    return _tensor(shape, torch.float32) if given else None


def _scale(argument: str, form: ScaleForm, shapes: dict[str, Shape]) -> Tensor | None:
    """Make the scale that a word or a shape stands for."""
    if form is None:
        return None
    if isinstance(form, str):
        if form not in shapes:
            raise ValueError(
                f"supports: `{argument}` must be None, a shape or one of {', '.join(shapes)}, got "
                f"{form!r}"
            )
        form = shapes[form]
    return _tensor(form, torch.float32)


def _weight_scale(
    argument: str,
    form: ScaleForm,
    groups: int,
    n: int,
    k: int,
    n_segments: int = 1,
    offset: Shape = (0, 0),
) -> Tensor | None:
    # What is wrong with others the op's checks say.
    segments = n_segments if n_segments in (1, 2) else 1
    n_offset, k_offset = offset if len(offset) == 2 else (0, 0)
    along_n = segments * ceil_div(n // segments + n_offset, SCALE_BLOCK)
    blocks = (groups, along_n, ceil_div(k + k_offset, SCALE_BLOCK))
    return _scale(argument, form, {"tensor": (groups,), "channel": (groups, n), "block": blocks})


def _gemm(
    op: Callable[..., Tensor],
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
    bias: bool | None = False,
    out_dtype: Dtype | None = None,
    **options: Any,
) -> None:
    dtype = _torch_dtype(dtype, _OPERANDS)
    by_row = {"tensor": (), "channel": rows, "block": (*rows, ceil_div(k, SCALE_BLOCK))}
    operands = (
        _tensor((*rows, k), dtype),
        _tensor((num_groups, n, k), dtype),
        _tensor((num_groups,), torch.int32),
    )
    options |= {
        "scale_a": _scale("scale_a", scale_a, by_row),
        "scale_b": _weight_scale("scale_b", scale_b, num_groups, n, k, n_segments, scale_b_offset),
        "scale_b_offset": scale_b_offset,
        "n_segments": n_segments,
        "bias": _optional(bias, (num_groups, n)),
        "out_dtype": None if out_dtype is None else _torch_dtype(out_dtype),
    }
    name, masked = op.__name__, len(rows) == 2
    form = check_grouped_gemm(name, None, *operands, masked=masked, **options, has_memory=False)
    num_rows = math.prod(rows)
    if num_rows > MAX_SIZE:
        raise ValueError(f"{name}: `a` must have at most {MAX_SIZE} rows, got {num_rows}")
    for dimension, size in (("n", n), ("k", k)):
        if size > MAX_SIZE:
            raise ValueError(f"{name}: {dimension} must be at most {MAX_SIZE}, got {size}")
    op(*operands, **options)
    choose(
        dtype=form.dtype,
        accumulate=form.accumulate,
        num_rows=num_rows,
        num_groups=num_groups,
        n=n,
        k=k,
    )


def _grouped_gemm(*, num_rows: int, **problem: Any) -> None:
    _gemm(grouped_gemm, (num_rows,), **problem)


def _grouped_gemm_masked(*, num_groups: int, max_rows: int, **problem: Any) -> None:
    _gemm(grouped_gemm_masked, (num_groups, max_rows), num_groups=num_groups, **problem)


class AskedLayer(NamedTuple):
    """A layer given by sizes: what its kernels depend on."""

    layer: Layer
    accumulate: str
    bias: bool
    batch_invariant: bool


def _layer(
    op: Callable[..., Tensor],
    check: Callable[..., Layer],
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
    a1_scale: bool | None = False,
    a2_scale: bool | None = False,
    w13_bias: bool | None = False,
    w2_bias: bool | None = False,
    accumulate: str = "promoted",
    batch_invariant: bool = False,
    **options: Any,
) -> AskedLayer:
    dtype = _torch_dtype(dtype, _OPERANDS)
    form = ACTIVATIONS.get(activation)
    n = intermediate_size * (2 if form is None or form.gated else 1)
    operands = (
        _tensor((*rows, hidden_size), torch.bfloat16),
        _tensor((num_experts, n, hidden_size), dtype),
        _tensor((num_experts, hidden_size, intermediate_size), dtype),
        *routing,
    )
    options |= {
        **layer_scales(num_experts, n, hidden_size, intermediate_size, w13_scale, w2_scale),
        "a1_scale": _optional(a1_scale, ()),
        "a2_scale": _optional(a2_scale, ()),
        "w13_bias": _optional(w13_bias, (num_experts, n)),
        "w2_bias": _optional(w2_bias, (num_experts, hidden_size)),
        "activation": activation,
        "accumulate": accumulate,
        "batch_invariant": batch_invariant,
    }
    layer = check(op.__name__, None, *operands, **options, has_memory=False)
    op(*operands, **options)
    return AskedLayer(layer, accumulate, bool(w13_bias), bool(batch_invariant))


def asked_fused_moe(
    *, num_tokens: int, top_k: int, hidden_size: int, addend: bool | None = False, **problem: Any
) -> AskedLayer:
    """Return what a problem of `fused_moe` asks for; raise where it is none, as `CHECKS` do."""
    routing = tuple(_tensor((num_tokens, top_k), kind) for kind in (torch.float32, torch.int32))
    problem |= {"hidden_size": hidden_size, "addend": _optional(addend, (num_tokens, hidden_size))}
    return _layer(fused_moe, check_fused_moe, (num_tokens,), routing, **problem)


def _fused_moe(**problem: Any) -> None:
    choose_kernels(*asked_fused_moe(**problem), _ANY_SM_COUNT)


def _fused_moe_masked(*, num_experts: int, max_rows: int, **problem: Any) -> None:
    rows, counts = (num_experts, max_rows), _tensor((num_experts,), torch.int32)
    problem["num_experts"] = num_experts
    asked = _layer(fused_moe_masked, check_fused_moe_masked, rows, (counts,), **problem)
    choose_kernels(*asked, _ANY_SM_COUNT)


def _quantize_fp8(*, dtype: Dtype, shape: Shape, granularity: str, **options: Any) -> None:
    x = _tensor(shape, _torch_dtype(dtype, _FLOATING))
    check_quantize_fp8("quantize_fp8", None, x, granularity, **options)
    quantize_fp8(x, granularity=granularity, **options)


def _topk_routing(
    *,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    dtype: Dtype = "bf16",
    correction_bias: bool | None = False,
    **options: Any,
) -> None:
    logits = _tensor((num_tokens, num_experts), _torch_dtype(dtype, _FLOATING))
    options["correction_bias"] = _optional(correction_bias, (num_experts,))
    check_topk_routing("topk_routing", None, logits, top_k, **options)
    topk_routing(logits, top_k=top_k, **options)


def _sort_tokens(
    *,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    dtype: torch.dtype = torch.int32,
    **options: Any,
) -> None:
    topk_ids = _tensor((num_tokens, top_k), dtype)
    check_sort_tokens(topk_ids, num_experts, **options)
    sort_tokens(topk_ids, num_experts=num_experts, **options)


def _combine_tokens(
    *,
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    addend: bool | None = False,
    out_dtype: Dtype | None = None,
    **options: Any,
) -> None:
    num_slots = num_tokens * top_k
    operands = (
        _tensor((num_slots, hidden_size), torch.bfloat16),
        _tensor((num_slots,), torch.int32),
        _tensor((num_tokens, top_k), torch.float32),
    )
    options |= {
        "top_k": top_k,
        "addend": _optional(addend, (num_tokens, hidden_size)),
        "out_dtype": None if out_dtype is None else _torch_dtype(out_dtype),
    }
    check_combine_tokens(*operands, **options, has_memory=False)
    combine_tokens(*operands, **options)


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
