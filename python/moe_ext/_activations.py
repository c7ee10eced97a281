"""Activations between the two GEMMs of a layer: names, numbers, defaults, and what they compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext._words import FLOAT_MAX

INTERLEAVED = "interleaved"
CONCATENATED = "concatenated"
GATE_UP_LAYOUTS = (CONCATENATED, INTERLEAVED)
"""How the rows of `w13` hold gate and up."""

_NONE = float("inf")


class Activation(NamedTuple):
    """What a name stands for.

    `slope` has a, b and c of g * sigmoid(g * (a + b * s + c * s^2)) * (u + up_offset), s = g^2,
    which every activation here is or is close to: csrc/grouped_gemm/params.hpp, Gating. Where
    there is no up row, u is g within -up_limit and up_limit.
    """

    gated: bool  # whether `w13` holds gate and up
    alpha: float | None = None  # the default, where there is such an argument
    limit: float | None = None  # the default; infinite is none
    slope: tuple[float, float, float] = (1.0, 0.0, 0.0)
    up_limit: float = _NONE
    up_offset: float = 0.0


_TANH_SLOPE = 2 * math.sqrt(2 / math.pi)  # tanh(x) is 2 * sigmoid(2 * x) - 1
ACTIVATIONS = {
    "swiglu": Activation(gated=True, limit=_NONE),
    "swiglu_oai": Activation(gated=True, alpha=1.702, limit=7.0, up_offset=1.0),
    # The normal distribution's integral as a sigmoid of an odd polynomial, fitted so that g times
    # it is within 3e-5 of GELU.
    "geglu": Activation(gated=True, slope=(1.59501576, 0.0740112976, -0.000703034366)),
    "geglu_tanh": Activation(gated=True, slope=(_TANH_SLOPE, 0.044715 * _TANH_SLOPE, 0.0)),
    # A sigmoid so steep that it is a step.
    "relu2": Activation(gated=False, slope=(1e30, 0.0, 0.0)),
    "silu": Activation(gated=False, up_limit=0.0, up_offset=1.0),
}


def gating(activation: str, alpha: float, limit: float) -> list[float]:
    """Return linear, cubic, quintic, gate_limit, up_limit and up_offset of C++'s Gating."""
    form = ACTIVATIONS[activation]
    linear, cubic, quintic = form.slope
    if form.alpha is not None:
        linear = alpha
    return [linear, cubic, quintic, limit, min(limit, form.up_limit), form.up_offset]


def _swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _swiglu_oai(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def _geglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    return torch.nn.functional.gelu(gate) * up


def _geglu_tanh(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


_GATED: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "swiglu": _swiglu,
    "swiglu_oai": _swiglu_oai,
    "geglu": _geglu,
    "geglu_tanh": _geglu_tanh,
}
_UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: torch.relu(x).square(),
    "silu": torch.nn.functional.silu,
}


def resolved(
    activation: str, alpha: float | None = None, limit: float | None = None
) -> tuple[float, float]:
    """Return alpha and limit with the activation's defaults; 0 and infinity where it has none."""
    default = ACTIVATIONS[activation]
    alpha = default.alpha if alpha is None else alpha
    limit = default.limit if limit is None else limit
    if limit is None or limit > FLOAT_MAX:  # no value of float32 is beyond it
        limit = _NONE
    return 0.0 if alpha is None else alpha, limit


def activate(
    gate_up: Tensor,
    activation: str,
    *,
    alpha: float | None = None,
    limit: float | None = None,
    gate_up_layout: str = CONCATENATED,
) -> Tensor:
    """Apply an activation to the float32 product of the first GEMM.

    Args:
        gate_up: (rows, 2 * intermediate) for gated activations, (rows, intermediate) for others.
        activation: one of `ACTIVATIONS`.
        alpha: None is the activation's default.
        limit: None is the activation's default.
        gate_up_layout: "concatenated" or "interleaved".

    Returns:
        (rows, intermediate), the dtype of `gate_up`. A NaN of gate or up is a NaN of the result.
    """
    if not ACTIVATIONS[activation].gated:
        return _UNGATED[activation](gate_up)
    if gate_up_layout == INTERLEAVED:
        gate, up = gate_up[:, 0::2], gate_up[:, 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=1)
    return _GATED[activation](gate, up, *resolved(activation, alpha, limit))
