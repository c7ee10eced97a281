"""A call of `topk_routing`: a good one goes to the C++ op at once, any other to the checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ext._cpu import warn_of_cpu
from moe_ext._library import device_kernels
from moe_ext._routing_checks import MAX_TOP_K, SCORINGS, check_topk_routing
from moe_ext._routing_reference import topk_routing_reference
from moe_ext._words import FLOAT_MAX, check_given

Outputs = tuple[Tensor, Tensor]


def empty_outputs(logits: Tensor, top_k: int) -> Outputs:
    """Allocate `weights` and `ids`."""
    shape = (logits.shape[0], top_k)
    return (
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(shape, dtype=torch.int32),
    )


def _launch(
    outputs: Outputs | None,
    logits: Tensor,
    top_k: int,
    scoring: str,
    correction_bias: Tensor | None,
    renormalize: bool,
    num_groups: int,
    topk_groups: int,
    scale: float,
) -> Outputs | None:
    """Launch a CUDA call whose tensors only the C++ op has looked at.

    Raises its ValueError, or returns None, for a call that is refused.
    """
    number = SCORINGS.get(scoring)
    if number is None or logits.dim() != 2 or not 1 <= top_k <= MAX_TOP_K:
        return None
    if not abs(scale) <= FLOAT_MAX:
        return None
    # What the C++ op knows as one, it takes from the outputs.
    if outputs is not None and outputs[0].shape[-1:] != (top_k,):
        return None
    # The C++ op takes any floating bias.
    if correction_bias is not None and correction_bias.dtype is torch.float16:
        return None
    kernels = device_kernels(logits.get_device())
    if outputs is None:
        outputs = empty_outputs(logits, top_k)
    kernels.topk_routing_configured(
        logits, correction_bias, *outputs, number, renormalize, num_groups, topk_groups, scale
    )
    return outputs


def _run(
    op: str,
    outputs: Outputs | None,
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    correction_bias: Tensor | None = None,
    renormalize: bool = True,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> Outputs:
    options = (scoring, correction_bias, renormalize, num_groups, topk_groups, scale)
    if logits.is_cuda:
        try:
            result = _launch(outputs, logits, top_k, *options)
        except ValueError:  # the checks below know the documented message
            result = None
        if result is not None:
            return result
    named: dict[str, Any] = {
        "scoring": scoring,
        "correction_bias": correction_bias,
        "renormalize": renormalize,
        "num_groups": num_groups,
        "topk_groups": topk_groups,
        "scale": scale,
    }
    check_topk_routing(op, outputs, logits, top_k, **named)
    if logits.is_cuda:
        result = _launch(outputs, logits, top_k, *options)  # raises again what no check knows
        assert result is not None
        return result
    warn_of_cpu()
    weights, ids = topk_routing_reference(logits, top_k, **named)
    if outputs is None:
        return weights, ids
    outputs[0].copy_(weights)
    outputs[1].copy_(ids)
    return outputs


def run_topk_routing(logits: Tensor, top_k: int, **options: Any) -> Outputs:
    """Implement `moe_ext::topk_routing` for CPU and CUDA."""
    return _run("topk_routing", None, logits, top_k, **options)


def run_topk_routing_out(
    logits: Tensor, top_k: int, *, weights: Tensor, ids: Tensor, **options: Any
) -> None:
    """Implement `moe_ext::topk_routing_out` for CPU and CUDA."""
    for argument, tensor in (("weights", weights), ("ids", ids)):
        check_given("topk_routing_out", argument, tensor)
    _run("topk_routing_out", (weights, ids), logits, top_k, **options)
