"""A call of `fused_moe_masked`: checked, then the reference on the CPU, one C++ op on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ext._activations import CONCATENATED, gating
from moe_ext._cpu import warn_of_cpu
from moe_ext._expected_rows import rows_to_choose_for
from moe_ext._fused_moe_checks import Layer
from moe_ext._fused_moe_kernels import choose_kernels
from moe_ext._fused_moe_launch import layer_flags
from moe_ext._fused_moe_masked_checks import check_fused_moe_masked
from moe_ext._fused_moe_masked_reference import fused_moe_masked_reference
from moe_ext._library import device_kernels
from moe_ext._math import ceil_div
from moe_ext._quantize_checks import ROW_ALIGNMENT
from moe_ext._scales import SCALE_BLOCK
from moe_ext._words import check_given

_OPERANDS = ("hidden_states", "w13", "w2", "counts")
_CUDA_ONLY = ("accumulate", "batch_invariant", "expected_rows")


def _scratch(layer: Layer, like: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Allocate the intermediate, and for FP8 values and scales that both GEMMs read in turn.

    csrc/fused_moe/masked_checks.hpp says how large they have to be.
    """
    rows = layer.num_tokens
    intermediate = like.new_empty(rows * layer.intermediate_size)
    if not layer.fp8:
        return intermediate, None, None
    widest = max(layer.hidden_size, layer.intermediate_size)
    row_bytes = ceil_div(widest, ROW_ALIGNMENT) * ROW_ALIGNMENT
    return (
        intermediate,
        like.new_empty(rows * row_bytes, dtype=torch.float8_e4m3fn),
        like.new_empty(rows * ceil_div(widest, SCALE_BLOCK), dtype=torch.float32),
    )


def _launch(
    layer: Layer,
    out: Tensor,
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    counts: Tensor,
    *,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "swiglu",
    alpha: float | None = None,  # the layer has it, with its default
    limit: float | None = None,  # likewise
    gate_up_layout: str = CONCATENATED,
    accumulate: str = "promoted",
    batch_invariant: bool = False,
    expected_rows: int | None = None,
) -> None:
    """Launch a CUDA call that has passed the checks."""
    kernels = device_kernels(hidden_states.get_device())  # says what is missing even without rows
    if layer.num_tokens == 0:
        return
    flags = layer_flags(activation, gate_up_layout, False, accumulate, batch_invariant)
    assert flags is not None  # the checks know the same options
    # How many rows count is not known here. Scratch is for all of them whatever is expected.
    rows = layer.num_experts * rows_to_choose_for(expected_rows, hidden_states.shape[1])
    likely = layer._replace(num_tokens=rows)
    chosen = choose_kernels(
        likely, accumulate, w13_bias is not None, batch_invariant, kernels.sm_count
    )
    kernels.fused_moe_masked_configured(
        hidden_states,
        w13,
        w2,
        counts,
        w13_scale,
        w2_scale,
        a1_scale,
        a2_scale,
        w13_bias,
        w2_bias,
        *_scratch(layer, hidden_states),
        out,
        flags,
        chosen.gate_up,
        chosen.down,
        gating(activation, layer.alpha, layer.limit),
    )


def _implementation(op: str, *, writes_out: bool = False) -> Callable[..., Tensor | None]:
    """Make the implementation of an op for CPU and CUDA."""

    def run(*operands: Tensor, out: Tensor | None = None, **options: Any) -> Tensor | None:
        for name, operand in zip(_OPERANDS, operands, strict=True):
            check_given(op, name, operand)
        if writes_out:
            check_given(op, "out", out)
        layer = check_fused_moe_masked(op, out, *operands, **options)
        hidden_states = operands[0]
        if out is None:
            out = hidden_states.new_empty(hidden_states.shape)
        if hidden_states.is_cuda:
            _launch(layer, out, *operands, **options)
        else:
            warn_of_cpu()
            described = {name: value for name, value in options.items() if name not in _CUDA_ONLY}
            fused_moe_masked_reference(*operands, out=out, **described)
        return None if writes_out else out

    return run


run_fused_moe_masked = _implementation("fused_moe_masked")
run_fused_moe_masked_out = _implementation("fused_moe_masked_out", writes_out=True)
