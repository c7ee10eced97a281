"""Every documented argument error of `sort_tokens`; on CUDA the C++ op checks first."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext._words import device_message, name_of

MAX_EXPERTS = 4096
MAX_TOP_K = 32
_MAX_SLOTS = 2**31 - 1 - 2**16  # the device counts in 32 bits, csrc/fused_moe/sort.hpp
_MAX_FIRST = 2**31 - 1


def check_sort_tokens(
    topk_ids: Tensor, num_experts: int, *, first_expert: int = 0, expert_map: Tensor | None = None
) -> None:
    """Raise a ValueError for the first argument that breaks the contract."""
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"sort_tokens: `topk_ids` must be int32 or int64, got {name_of(topk_ids.dtype)}"
        )
    shape = tuple(topk_ids.shape)
    if topk_ids.dim() != 2 or not 1 <= shape[1] <= MAX_TOP_K:
        raise ValueError(
            "sort_tokens: `topk_ids` must have shape (num_tokens, top_k) with top_k in "
            f"[1, {MAX_TOP_K}], got {shape}"
        )
    if shape[1] > 1 and topk_ids.stride()[1] != 1:
        raise ValueError(
            "sort_tokens: `topk_ids` must have a contiguous last dimension, got strides "
            f"{topk_ids.stride()} for shape {shape}"
        )
    if topk_ids.numel() > _MAX_SLOTS:
        raise ValueError(
            f"sort_tokens: `topk_ids` must have at most {_MAX_SLOTS} elements, got "
            f"{topk_ids.numel()} for shape {shape}"
        )
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(
            f"sort_tokens: `num_experts` must be in [1, {MAX_EXPERTS}], got {num_experts}"
        )
    if not 0 <= first_expert <= _MAX_FIRST:
        raise ValueError(
            f"sort_tokens: `first_expert` must be in [0, {_MAX_FIRST}], got {first_expert}"
        )
    if expert_map is not None:
        _check_expert_map(expert_map, topk_ids, first_expert)


def _check_expert_map(expert_map: Tensor, topk_ids: Tensor, first_expert: int) -> None:
    if first_expert != 0:
        raise ValueError(
            "sort_tokens: `first_expert` must be 0 where `expert_map` says which experts are "
            f"here, got {first_expert}"
        )
    if expert_map.dtype is not torch.int32:
        raise ValueError(
            f"sort_tokens: `expert_map` must be int32, got {name_of(expert_map.dtype)}"
        )
    if expert_map.device != topk_ids.device:
        raise ValueError(
            device_message("sort_tokens", "expert_map", expert_map, "topk_ids", topk_ids)
        )
    if expert_map.dim() != 1 or not expert_map.is_contiguous():
        raise ValueError(
            "sort_tokens: `expert_map` must have shape (num_global,) and be contiguous, got shape "
            f"{tuple(expert_map.shape)} and strides {expert_map.stride()}"
        )
