"""A call of `sort_tokens`: a good one goes to the C++ op at once, any other to the checks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ext._cpu import warn_of_cpu
from moe_ext._library import device_kernels
from moe_ext._sort_checks import MAX_EXPERTS, check_sort_tokens
from moe_ext._tokens_reference import sort_tokens_reference

Sorted = tuple[Tensor, Tensor, Tensor]


def empty_outputs(topk_ids: Tensor, num_experts: int) -> Sorted:
    """Allocate `offs`, `row_slot` and `slot_row`."""
    num_slots = topk_ids.numel()
    return (
        topk_ids.new_empty((num_experts,), dtype=torch.int32),
        topk_ids.new_empty((num_slots,), dtype=torch.int32),
        topk_ids.new_empty((num_slots,), dtype=torch.int32),
    )


@functools.lru_cache(maxsize=1024)
def _scratch_elems(op: Callable[..., int], num_slots: int, num_experts: int) -> int:
    return op(num_slots, num_experts)


def _launch(
    topk_ids: Tensor, num_experts: int, first_expert: int, expert_map: Tensor | None
) -> Sorted | None:
    """Launch a CUDA call whose tensors only the C++ op has looked at.

    Raises its ValueError, or returns None, for a call that is refused.
    """
    if not 1 <= num_experts <= MAX_EXPERTS or (expert_map is not None and first_expert != 0):
        return None
    kernels = device_kernels(topk_ids.get_device())
    outputs = empty_outputs(topk_ids, num_experts)
    scratch = None
    elems = _scratch_elems(kernels.sort_tokens_scratch, topk_ids.numel(), num_experts)
    if elems:
        scratch = topk_ids.new_empty((elems,), dtype=torch.int32)
    kernels.sort_tokens_configured(topk_ids, *outputs, scratch, expert_map, first_expert)
    return outputs


def run_sort_tokens(
    topk_ids: Tensor, num_experts: int, *, first_expert: int = 0, expert_map: Tensor | None = None
) -> Sorted:
    """Implement `moe_ext::sort_tokens` for CPU and CUDA."""
    options: dict[str, Any] = {"first_expert": first_expert, "expert_map": expert_map}
    if topk_ids.is_cuda:
        refused = None
        try:
            outputs = _launch(topk_ids, num_experts, first_expert, expert_map)
        except ValueError as error:  # the checks below know the documented message
            outputs, refused = None, error
        if outputs is not None:
            return outputs
        check_sort_tokens(topk_ids, num_experts, **options)
        raise refused or AssertionError("a call that the checks accept is launched")
    check_sort_tokens(topk_ids, num_experts, **options)
    warn_of_cpu()
    return sort_tokens_reference(topk_ids, num_experts, **options)
