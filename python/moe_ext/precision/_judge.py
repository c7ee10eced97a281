"""Errors of experts that too few tokens chose, judged from their weights alone.

With P the output energy that the sizes of an expert's weights promise, d the relative energy of
what FP8 changes in a stage's weights, and medians over the experts with enough rows:

    error = min_rows * median(output energy of a row / P) * P * (d + a) * max(1, kurtosis / median)

where a, what FP8 does to the stage's activations, is the median of (error / output energy) - d. The
last factor is for weights of heavier tails than the layer's others, whose outliers may meet those
of activations; the rows are as many as the expert may be hit by without being judged by them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext._activations import ACTIVATIONS
from moe_ext.precision._measure import Measurement


def judge(measured: Measurement, min_rows: int) -> tuple[Tensor, Tensor]:
    """Return the errors (num_experts, 2) and whether each is from weights (num_experts,)."""
    enough = measured.rows >= min_rows
    error = measured.sums["error"].clone()
    if bool(enough.all()):
        return error, ~enough
    # Where no expert has enough rows, those with any give at least the size of things.
    known = enough if bool(enough.any()) else measured.rows > 0
    known = known & (measured.output_energy > 0)
    promised = _promised_energy(measured)
    by_row = measured.output_energy / measured.rows.clamp_min(1)
    ratio = _median((by_row / promised)[known & (promised > 0)], default=1.0)
    of_weights = measured.weights["weight_error"]
    relative = error[known] / measured.output_energy[known, None]
    of_rows = torch.stack(
        [
            _median(column, default=0.0)
            for column in (relative - of_weights[known]).clamp_min(0).unbind(1)
        ]
    )
    kurtosis = measured.weights["kurtosis"]
    usual = torch.stack([_median(column, default=0.0) for column in kurtosis.unbind(1)])
    tails = torch.where(usual > 0, kurtosis / usual, 1.0).clamp_min(1)
    estimate = min_rows * ratio * promised[:, None] * (of_weights + of_rows) * tails
    return torch.where(enough[:, None], error, estimate), ~enough


def promised_signal(measured: Measurement, min_rows: int) -> float:
    """Return the energy of the output that weights promise if each expert had `min_rows` rows."""
    return min_rows * float(_promised_energy(measured).sum())


def _promised_energy(measured: Measurement) -> Tensor:
    """Return (num_experts,): how the sizes of weights multiply on the way to an expert's output."""
    first, down = measured.weights["weight_energy"].unbind(1)
    name = measured.experts.activation
    if ACTIVATIONS[name].gated:
        return measured.gate_up_energy.prod(1) * down
    return (first.square() if name == "relu2" else first) * down


def _median(values: Tensor, default: float) -> Tensor:
    return values.median() if values.numel() else values.new_tensor(default)
