"""Every documented argument error of `topk_routing`.

On CUDA the C++ op checks first, as for `grouped_gemm`, and this puts its refusals into words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext._words import check_finite, device_message, name_of

SCORINGS = {"softmax": 0, "softmax_topk": 1, "sigmoid": 2, "sqrt_softplus": 3}
"""What `scoring` may be, and the number that the C++ op takes for it."""

MAX_EXPERTS = 2048
MAX_TOP_K = 32
MAX_GROUPS = 32
_LOGIT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_TOKENS = 2**31 - 1


def check_topk_routing(
    op: str,
    outputs: tuple[Tensor, Tensor] | None,
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    correction_bias: Tensor | None = None,
    renormalize: bool = True,  # nothing about it can be wrong
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> None:
    """Raise a ValueError for the first argument that breaks the contract.

    `outputs` are `weights` and `ids` of `topk_routing_out`.
    """
    if scoring not in SCORINGS:
        names = ", ".join(f'"{name}"' for name in SCORINGS)
        raise ValueError(f'{op}: `scoring` must be one of {names}, got "{scoring}"')
    if logits.dtype not in _LOGIT_DTYPES:
        raise ValueError(
            f"{op}: `logits` must be bfloat16, float16 or float32, got {name_of(logits.dtype)}"
        )
    if logits.dim() != 2:
        raise ValueError(
            f"{op}: `logits` must have shape (num_tokens, num_experts), got {tuple(logits.shape)}"
        )
    num_tokens, num_experts = logits.shape
    if num_tokens > _MAX_TOKENS:
        raise ValueError(f"{op}: `logits` must have at most {_MAX_TOKENS} tokens, got {num_tokens}")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"{op}: `logits` must have 1 to {MAX_EXPERTS} experts, got {num_experts}")
    _check_contiguous(op, "logits", logits)
    _check_choice(op, num_experts, top_k, num_groups, topk_groups)
    if correction_bias is not None:
        _check_bias(op, correction_bias, logits)
    check_finite(op, "scale", scale)
    if outputs is not None:
        _check_output(op, "weights", outputs[0], torch.float32, logits, top_k)
        _check_output(op, "ids", outputs[1], torch.int32, logits, top_k)


def _check_choice(op: str, num_experts: int, top_k: int, num_groups: int, topk_groups: int) -> None:
    if not 1 <= num_groups <= MAX_GROUPS or num_experts % num_groups:
        raise ValueError(
            f"{op}: `num_groups` must be 1 to {MAX_GROUPS} and divide the {num_experts} experts of "
            f"`logits`, got {num_groups}"
        )
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(
            f"{op}: `topk_groups` must be 1 to `num_groups` = {num_groups}, got {topk_groups}"
        )
    if not 1 <= top_k <= MAX_TOP_K:
        raise ValueError(f"{op}: `top_k` must be 1 to {MAX_TOP_K}, got {top_k}")
    eligible = num_experts // num_groups * topk_groups
    if top_k > eligible:
        raise ValueError(
            f"{op}: `top_k` must be at most the {eligible} experts of {topk_groups} of "
            f"{num_groups} groups, got {top_k}"
        )


def _check_bias(op: str, bias: Tensor, logits: Tensor) -> None:
    if bias.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"{op}: `correction_bias` must be float32 or bfloat16, got {name_of(bias.dtype)}"
        )
    if bias.device != logits.device:
        raise ValueError(device_message(op, "correction_bias", bias, "logits", logits))
    num_experts = logits.shape[1]
    if bias.shape != (num_experts,):
        raise ValueError(
            f"{op}: `correction_bias` must have shape (num_experts,) = ({num_experts},), got "
            f"{tuple(bias.shape)}"
        )


def _check_output(
    op: str, argument: str, out: Tensor, dtype: torch.dtype, logits: Tensor, top_k: int
) -> None:
    if out.dtype is not dtype:
        raise ValueError(f"{op}: `{argument}` must be {name_of(dtype)}, got {name_of(out.dtype)}")
    if out.device != logits.device:
        raise ValueError(device_message(op, argument, out, "logits", logits))
    shape = (logits.shape[0], top_k)
    if out.shape != shape:
        raise ValueError(
            f"{op}: `{argument}` must have shape (num_tokens, top_k) = {shape}, got "
            f"{tuple(out.shape)}"
        )
    _check_contiguous(op, argument, out)
    if out.shape[0] > 1 and out.stride()[0] < top_k:
        raise ValueError(
            f"{op}: `{argument}` must have a stride of at least {top_k} between its rows, got "
            f"strides {out.stride()} for shape {tuple(out.shape)}"
        )


def _check_contiguous(op: str, argument: str, tensor: Tensor) -> None:
    if tensor.shape[1] > 1 and tensor.stride()[1] != 1:
        raise ValueError(
            f"{op}: `{argument}` must have a contiguous last dimension, got strides "
            f"{tensor.stride()} for shape {tuple(tensor.shape)}"
        )
