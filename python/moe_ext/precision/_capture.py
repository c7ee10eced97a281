"""The tokens that reach the experts of a layer or model, and what a model makes of its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_ext._tokens_reference import local_experts
from moe_ext.nn._arguments import shown
from moe_ext.nn.experts import Experts
from moe_ext.nn.moe_layer import MoELayer
from moe_ext.precision._measure import Routed

_OP = "calibrate"
ALONE = "experts"
"""Name of experts that are no part of a layer: as a layer calls its own."""


def layers_of(module: nn.Module) -> dict[str, Experts]:
    """Return the experts in a module by name, in order."""
    found = {name or ALONE: m for name, m in module.named_modules() if isinstance(m, Experts)}
    if not found:
        raise ValueError(
            f"{_OP}: `model_or_layer` must be or hold moe_ext.nn.Experts, got "
            f"{type(module).__name__} without"
        )
    for name, experts in found.items():
        if experts.w13.dtype is not torch.bfloat16:
            raise ValueError(
                f'{_OP}: the weights of "{name}" must be bfloat16, which FP8 is compared with, '
                f"got {str(experts.w13.dtype).removeprefix('torch.')}"
            )
    return found


def routed(experts: Experts, *args: Any, **options: Any) -> Routed:
    """Return what a call of experts has, flat, with ids as experts of the layer."""
    bound = inspect.signature(experts.forward).bind(*args, **options).arguments
    expert_map = bound.get("expert_map")
    ids = local_experts(
        bound["topk_ids"].long(),
        experts.num_experts,
        experts.first_expert if expert_map is None else 0,
        expert_map,
    )
    tensors = (bound["hidden_states"], bound["topk_weights"], ids)
    flat = (tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors)
    return Routed(*(tensor.detach().clone() for tensor in flat))


class NotFinite(NamedTuple):
    """A value among the inputs of a call of experts."""

    part: str  # "hidden_states" or "topk_weights"
    row: int  # of the flat tensor
    value: float

    def describe(self, inputs: str, row_of: str = "") -> str:
        """Say what must be otherwise."""
        return f"{inputs} must be finite, got {self.value} in row {self.row}{row_of}"


def first_not_finite(call: Routed, num_experts: int) -> NotFinite | None:
    """Return the first value that is not finite and reaches an expert."""
    for part, tensor in (
        ("hidden_states", call.hidden_states),
        ("topk_weights", call.topk_weights),
    ):
        finite = tensor.isfinite()
        if bool(finite.all()):
            continue
        reaches = call.experts < num_experts
        if part == "hidden_states":  # of a row that one expert at least takes
            reaches = reaches.any(1, keepdim=True)
        for row, column in (~finite & reaches).nonzero()[:1].tolist():
            return NotFinite(part, row, float(tensor[row, column]))
    return None


def run(module: nn.Module, batch: Any) -> Any:
    """Call a module with a batch."""
    if isinstance(batch, Mapping):
        return module(**batch)
    if isinstance(batch, tuple):
        return module(*batch)
    if isinstance(batch, Tensor):
        return module(batch)
    raise ValueError(
        f"{_OP}: a batch must be a tensor, a tuple of arguments or a mapping of named ones, got "
        f"{shown(batch)}"
    )


def capture(module: nn.Module, layers: dict[str, Experts], batch: Any) -> dict[str, list[Routed]]:
    """Return the calls of experts that a batch makes; of a lone layer without running it."""
    if isinstance(module, Experts):
        if isinstance(batch, Mapping):
            return {ALONE: [routed(module, **batch)]}
        if not isinstance(batch, tuple):
            raise ValueError(
                f"{_OP}: a batch of Experts must be a tuple (hidden_states, topk_weights, "
                f"topk_ids), got {shown(batch)}"
            )
        return {ALONE: [routed(module, *batch)]}
    if isinstance(module, MoELayer) and isinstance(batch, Tensor):
        ((name, experts),) = layers.items()
        return {name: [routed(experts, batch, *module.route(batch))]}
    calls: dict[str, list[Routed]] = {name: [] for name in layers}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, options: calls[name].append(routed(module, *args, **options))

    hooks = [
        experts.register_forward_pre_hook(keep(name), with_kwargs=True)
        for name, experts in layers.items()
    ]
    try:
        run(module, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


@contextmanager
def replaced(experts: Experts, other: nn.Module) -> Iterator[None]:
    """Let another module answer the calls of experts."""

    def answer(_: nn.Module, args: Any, options: Any, __: Any) -> Any:
        return other(*args, **options)

    hook = experts.register_forward_hook(answer, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def output_of(result: Any) -> Tensor:
    """Return the tensor that a model's result is, or its logits, or its first part."""
    for value in (result, getattr(result, "logits", None)):
        if isinstance(value, Tensor):
            return value
    if isinstance(result, (tuple, list)) and result and isinstance(result[0], Tensor):
        return result[0]
    raise ValueError(
        f"{_OP}: the model must return a tensor, something with `logits`, or a tuple that begins "
        f"with a tensor, got {shown(result)}; `model_output` may say what counts"
    )
