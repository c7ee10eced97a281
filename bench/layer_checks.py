"""Correctness of a whole layer before timing: a sample of tokens against the reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bench.checks import sample_rows
from bench.layer import LayerProblem, make_layer_scales
from bench.layer_reference import layer_by_parts

# Values of the intermediate are rounded to other FP8 numbers where the activation's last bits tip
# them over a tie; one that is the largest of a row changes the scale of that row.
MAX_LAYER_ERROR = 0.02


def max_layer_error(problem: LayerProblem, scale: str, out: Tensor) -> float:
    """Return the largest error of a token: absolute difference over its largest reference value.

    Args:
        problem: Inputs of the cell; `out` must come from call 0, so copy 0 and draw 0.
        scale: Layout of the scales, as in `make_layer_scales`.
        out: (num_tokens, hidden_size).

    Returns:
        The worst of up to 16 tokens, first and last among them; infinity when any element of `out`
        is not finite (an unwritten row, as it starts as NaN).
    """
    # Here, so that other providers are measured where moe_ext is not.
    from moe_ext.reference import fused_moe_reference

    scales = make_layer_scales(problem, scale)
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
