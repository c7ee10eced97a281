"""The ops `moe_ext::fused_moe_masked` and `fused_moe_masked_out`: a buffer for each expert.

What low-latency expert-parallel dispatch leaves and its combine wants: rows come sorted into
buffers of a fixed size, with the number of those that came on the device, and stay there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_ext._call import call
from moe_ext._fused_moe_masked_checks import check_fused_moe_masked
from moe_ext._fused_moe_masked_run import run_fused_moe_masked, run_fused_moe_masked_out
from moe_ext._register import register

_OPERANDS = "Tensor hidden_states, Tensor w13, Tensor w2, Tensor counts"
_OPTIONS = (
    "Tensor? w13_scale=None, Tensor? w2_scale=None, Tensor? a1_scale=None, Tensor? a2_scale=None, "
    "Tensor? w13_bias=None, Tensor? w2_bias=None, str activation='swiglu', float? alpha=None, "
    "float? limit=None, str gate_up_layout='concatenated', str accumulate='promoted', "
    "bool batch_invariant=False, int? expected_rows=None"
)


def fused_moe_masked(
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
    alpha: float | None = None,
    limit: float | None = None,
    gate_up_layout: str = "concatenated",
    accumulate: str = "promoted",
    batch_invariant: bool = False,
    expected_rows: int | None = None,
) -> Tensor:
    """Run each expert of a layer on the first rows of its own buffer; rows stay where they are.

    out[e, i] = w2[e] @ act(w13[e] @ hidden_states[e, i] + w13_bias[e]) + w2_bias[e] for
    i < counts[e]. No routing weights: whoever combines the rows multiplies.

    Args:
        hidden_states: (num_experts, max_rows, hidden), bfloat16, last dimension contiguous, rows
            16-byte aligned, experts follow each other without a gap: stride(0) is max_rows *
            stride(1); CUDA, or CPU for the slow reference. hidden a multiple of 8. num_experts *
            max_rows times the blocks of 128 of hidden, or of intermediate if there are more, at
            most 2**31 - 2**16 - 1. max_rows may be 0.
        w13: as in `fused_moe`, like all arguments but those below.
        w2: see `fused_moe`.
        counts: (num_experts,), int32, contiguous, same device. Rows of each expert, 0 to max_rows;
            clamped to that. Never read by the host on CUDA.
        w13_scale: see `fused_moe`.
        w2_scale: see `fused_moe`.
        a1_scale: see `fused_moe`.
        a2_scale: see `fused_moe`.
        w13_bias: see `fused_moe`.
        w2_bias: see `fused_moe`.
        activation: see `fused_moe`.
        alpha: see `fused_moe`.
        limit: see `fused_moe`.
        gate_up_layout: see `fused_moe`.
        accumulate: see `fused_moe`.
        batch_invariant: makes the result of a row bitwise independent of max_rows and
            expected_rows too, at some cost; of the other rows it is in any case. (On the CPU the
            result need not be.)
        expected_rows: rows of an average expert, for the choice of kernels: the host cannot see
            `counts`. Any number gives the same result, bit for bit where it gives the same kernels.
            None is max_rows.

    Returns:
        (num_experts, max_rows, hidden), bfloat16, contiguous. Rows from counts[e] on are left
        unwritten (uninitialised memory); what `hidden_states` holds there changes no result.

    Raises:
        ValueError: an argument differs from the above; the message has what was expected and what
            came.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        Rounded are, apart from sums in float32: rows to FP8, as `moe_ext.quantize_fp8` does it; the
        activation's result to bfloat16, then for FP8 weights to FP8; `out` once.
        `moe_ext.reference.fused_moe_masked_reference` is the same in plain PyTorch.
        On CUDA it allocates, beside the output, 2 bytes for each value of the intermediate and, for
        FP8 weights, about 1 for each value of the wider of hidden rows and intermediate, for all
        rows of the buffers.
        As `fused_moe`: no synchronisation, safe in CUDA graphs (sizes fixed, `counts` and rows may
        change between replays), deterministic, inference only.

    Example:
        >>> import torch
        >>> hidden, w13 = torch.ones(2, 4, 16).bfloat16(), torch.ones(2, 16, 16).bfloat16()
        >>> w2, counts = torch.ones(2, 16, 8).bfloat16(), torch.tensor([3, 0], dtype=torch.int32)
        >>> out = fused_moe_masked(hidden, w13, w2, counts)
        >>> out.shape, out[0, :3, 0].tolist()
        (torch.Size([2, 4, 16]), [2048.0, 2048.0, 2048.0])
    """
    result: Tensor = call(
        _OP,
        (hidden_states, w13, w2, counts),
        {
            "w13_scale": w13_scale,
            "w2_scale": w2_scale,
            "a1_scale": a1_scale,
            "a2_scale": a2_scale,
            "w13_bias": w13_bias,
            "w2_bias": w2_bias,
            "activation": activation,
            "alpha": alpha,
            "limit": limit,
            "gate_up_layout": gate_up_layout,
            "accumulate": accumulate,
            "batch_invariant": batch_invariant,
            "expected_rows": expected_rows,
        },
    )
    return result


def fused_moe_masked_out(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    counts: Tensor,
    *,
    out: Tensor,
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
    accumulate: str = "promoted",
    batch_invariant: bool = False,
    expected_rows: int | None = None,
) -> None:
    """Run each expert of a layer on the first rows of its own buffer, into `out`.

    Args:
        hidden_states: as in `fused_moe_masked`, like all arguments but `out`.
        w13: see `fused_moe_masked`.
        w2: see `fused_moe_masked`.
        counts: see `fused_moe_masked`.
        out: (num_experts, max_rows, hidden), bfloat16, same device as `hidden_states`, last
            dimension contiguous, rows 16-byte aligned, experts without a gap; under `torch.compile`
            contiguous altogether. Must not overlap the inputs (not checked).
        w13_scale: see `fused_moe_masked`.
        w2_scale: see `fused_moe_masked`.
        a1_scale: see `fused_moe_masked`.
        a2_scale: see `fused_moe_masked`.
        w13_bias: see `fused_moe_masked`.
        w2_bias: see `fused_moe_masked`.
        activation: see `fused_moe_masked`.
        alpha: see `fused_moe_masked`.
        limit: see `fused_moe_masked`.
        gate_up_layout: see `fused_moe_masked`.
        accumulate: see `fused_moe_masked`.
        batch_invariant: see `fused_moe_masked`.
        expected_rows: see `fused_moe_masked`.

    Raises:
        ValueError: an argument differs from the above.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        Rows of `out` from counts[e] on keep what they held.
    """
    call(
        _OUT_OP,
        (hidden_states, w13, w2, counts),
        {
            "w13_scale": w13_scale,
            "w2_scale": w2_scale,
            "a1_scale": a1_scale,
            "a2_scale": a2_scale,
            "w13_bias": w13_bias,
            "w2_bias": w2_bias,
            "activation": activation,
            "alpha": alpha,
            "limit": limit,
            "gate_up_layout": gate_up_layout,
            "accumulate": accumulate,
            "batch_invariant": batch_invariant,
            "expected_rows": expected_rows,
            "out": out,
        },
    )


def _fake(*operands: Tensor, **options: Any) -> Tensor:
    check_fused_moe_masked("fused_moe_masked", None, *operands, **options, has_memory=False)
    return operands[0].new_empty(operands[0].shape)


def _out_fake(*operands: Tensor, out: Tensor, **options: Any) -> None:
    check_fused_moe_masked("fused_moe_masked_out", out, *operands, **options, has_memory=False)


_OP = register(
    "fused_moe_masked", f"({_OPERANDS}, *, {_OPTIONS}) -> Tensor", run_fused_moe_masked, _fake
)
_OUT_OP = register(
    "fused_moe_masked_out",
    f"({_OPERANDS}, *, {_OPTIONS}, Tensor(a!) out) -> ()",
    run_fused_moe_masked_out,
    _out_fake,
)
