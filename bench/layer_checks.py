"""Correctness of a whole layer before timing: a sample of tokens against the reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bench.checks import sample_rows
from bench.layer import LayerProblem, LayerScales, make_layer_scales
from bench.layer_reference import layer_by_parts

# Values of the intermediate are rounded to other FP8 numbers where the activation's last bits tip
# them over a tie; one that is the largest of a row changes the scale of all.
MAX_LAYER_ERROR = 0.02


def max_layer_error(
    problem: LayerProblem, scale: str, out: Tensor, *, batch_invariant: bool = False
) -> float:
    """Return the largest error of a token: absolute difference over its largest reference value.

    Args:
        problem: Inputs of the cell; `out` must come from call 0, so copy 0 and draw 0.
        scale: Layout of the scales, as in `make_layer_scales`.
        out: (num_tokens, hidden_size).
        batch_invariant: Whether a scale of all rows was replaced by one for each row.

    Returns:
        The worst of up to 16 tokens, first and last among them; infinity when any element of `out`
        is not finite (an unwritten row, as it starts as NaN).
    """
    # Here, so that other providers are measured where moe_ext is not.
    from moe_ext.reference import fused_moe_reference

    scales = make_layer_scales(problem, scale)
    if batch_invariant and out.is_cuda:  # the CPU has no such mode
        scales = _per_row(problem, scales)
    hidden_states, w13, w2, weights, ids = problem.operands(0)
    tokens = torch.from_numpy(sample_rows(len(hidden_states))).to(out.device)
    run_reference = layer_by_parts if problem.plan.cell.dtype == "fp8" else fused_moe_reference
    reference = run_reference(
        hidden_states[tokens],
        w13,
        w2,
        weights[tokens],
        ids[tokens],
        **scales._asdict(),
        out_dtype=torch.float32,
    )
    if not bool(out.sum(dtype=torch.float32).isfinite()):
        return math.inf
    difference = (out[tokens].float() - reference).abs().amax(dim=1)
    return float((difference / reference.abs().amax(dim=1)).max())


def _per_row(problem: LayerProblem, scales: LayerScales) -> LayerScales:
    """Spread scales of experts over channels: the reference then quantises row by row."""

    def spread(scale: Tensor | None, static: Tensor | None, weights: Tensor) -> Tensor | None:
        if scale is None or scale.dim() != 1 or static is not None:
            return scale
        return scale[:, None].expand(weights.shape[:2])

    return scales._replace(
        w13_scale=spread(scales.w13_scale, scales.a1_scale, problem.w13[0]),
        w2_scale=spread(scales.w2_scale, scales.a2_scale, problem.w2[0]),
    )
