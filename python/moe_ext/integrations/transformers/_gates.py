"""Which activation of `fused_moe` a module of experts has, and the proof of it by values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.integrations.moe import _default_apply_gate

from moe_ext._activations import CONCATENATED, INTERLEAVED, activate


class Gate(NamedTuple):
    """The arguments of `fused_moe` that say what lies between the two GEMMs."""

    activation: str
    alpha: float | None = None
    limit: float | None = None
    gate_up_layout: str = CONCATENATED


_GATED = {
    "SiLUActivation": "swiglu",
    "SiLU": "swiglu",
    "silu": "swiglu",
    "GELUActivation": "geglu",
    "GELUTanh": "geglu_tanh",
    "NewGELUActivation": "geglu_tanh",
    "FastGELUActivation": "geglu_tanh",
    "AccurateGELUActivation": "geglu_tanh",
}
_UNGATED = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "silu": "silu",
    "ReLUSquaredActivation": "relu2",
}
# Where the clamp of a gate is kept, and the factor of its sigmoid.
_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")
_LARGEST = 40.0  # of the probe's values; no limit of a published model is near it
_ATTRIBUTE = "_moe_ext_gate"


def remembered_gate(module: Any) -> Gate | None:
    """Return the gate that `checked_gate` has found for a module, if it has been asked."""
    gate: Gate | None = getattr(module, _ATTRIBUTE, None)
    return gate


def gate_of(module: Any) -> Gate:
    """Return the gate of a module that has not been checked yet.

    While torch.compile traces or a CUDA graph is captured no value can be looked at: then the gates
    of Transformers itself, default and FP8, are taken at their word, and others are an error.
    """
    if torch.compiler.is_compiling() or recording(module.down_proj):
        if module.has_gate and not _is_of_transformers(module):
            raise RuntimeError(
                f"moe_ext: {type(module).__name__} must have run once, or been given to "
                "moe_ext.integrations.transformers.register(model), before torch.compile or a CUDA "
                "graph: its own _apply_gate has not been checked"
            )
        return _likely_gate(module)
    return checked_gate(module, module.down_proj.device)


def checked_gate(module: Any, device: torch.device) -> Gate:
    """Find the gate of a module, hold it against the module's own on some values, remember it."""
    gate = _likely_gate(module)
    x = _probe(gate, device)
    with torch.no_grad():
        theirs = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        ours = activate(x, **gate._asdict())
    # Float32 on both sides: roundings are far smaller, what BF16 could tell apart is far larger.
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-4, atol=1e-4):
        raise ValueError(
            f"moe_ext: the activation of {type(module).__name__} must be one of fused_moe's, got "
            f"one that differs from the likeliest, {gate}"
        )
    setattr(module, _ATTRIBUTE, gate)
    return gate


def recording(tensor: Tensor) -> bool:
    """Whether the current stream of the tensor's device is being captured."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_of_transformers(module: Any) -> bool:
    own = type(module)._apply_gate
    return own is _default_apply_gate or own is FP8Experts._apply_gate


def _likely_gate(module: Any) -> Gate:
    """Guess from names and attributes; right for the gates of Transformers itself."""
    if not module.has_gate:
        return Gate(_named(module, _UNGATED))
    if type(module)._apply_gate is _default_apply_gate:
        return Gate(_named(module, _GATED))
    layout = CONCATENATED if module.is_concatenated else INTERLEAVED
    alpha, limit = _number(module, _ALPHAS), _number(module, _LIMITS)
    if alpha is not None:
        return Gate("swiglu_oai", alpha, limit, layout)
    # A gate without act_fn has its activation in its code: SiLU, or the probe will tell.
    activation = _named(module, _GATED) if hasattr(module, "act_fn") else "swiglu"
    return Gate(activation, None, limit if activation == "swiglu" else None, layout)


def _named(module: Any, table: dict[str, str]) -> str:
    own = module.act_fn
    name = own.__name__ if hasattr(own, "__name__") else type(own).__name__
    if name not in table:
        raise ValueError(
            f"moe_ext: the activation of {type(module).__name__} must be one of "
            f"{', '.join(table)}, got {name}"
        )
    return table[name]


def _number(module: Any, names: tuple[str, ...]) -> float | None:
    for name in names:
        value = getattr(module, name, None)
        if value is not None:
            return float(value)
    return None


def _probe(gate: Gate, device: torch.device) -> Tensor:
    """Make rows with gate and up below, between and above the limits, and a few around zero."""
    largest = _LARGEST if gate.limit is None else max(_LARGEST, 2 * min(gate.limit, 1e4))
    values = torch.cat([torch.linspace(-largest, largest, 64), torch.linspace(-4, 4, 64)])
    return torch.stack([values.roll(shift) for shift in (0, 7, 31, 64)]).to(device)
