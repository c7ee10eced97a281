"""Activations between the two GEMMs of a layer: names, numbers, defaults, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

INTERLEAVED = "interleaved"
CONCATENATED = "concatenated"
GATE_UP_LAYOUTS = {CONCATENATED: 0, INTERLEAVED: 1}
"""How the rows of `w13` hold gate and up, and the number that the C++ op takes for it."""


class Activation(NamedTuple):
    """What a name stands for."""

    number: int  # what the C++ op takes for it
    gated: bool  # whether `w13` holds gate and up
    alpha: float | None = None  # the default, where there is such an argument
    limit: float | None = None  # the default; infinite is none


_NONE = float("inf")
ACTIVATIONS = {
    "swiglu": Activation(0, gated=True, limit=_NONE),
    "swiglu_oai": Activation(1, gated=True, alpha=1.702, limit=7.0),
    "geglu": Activation(2, gated=True),
    "geglu_tanh": Activation(3, gated=True),
    "relu2": Activation(4, gated=False),
    "silu": Activation(5, gated=False),
}


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
    return 0.0 if alpha is None else alpha, _NONE if limit is None else limit


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
