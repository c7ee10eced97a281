"""The op `moe_ext::combine_tokens`: contract, registration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ext._call import call
from moe_ext._combine_checks import check_combine_tokens
from moe_ext._combine_run import empty_output, run_combine_tokens
from moe_ext._register import register
from moe_ext._words import check_given


def combine_tokens(
    y: Tensor,
    slot_row: Tensor,
    topk_weights: Tensor | None,
    *,
    top_k: int,
    addend: Tensor | None = None,
    routed_scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Add the rows of each token, weighted, at the end of a layer.

    out[t] = routed_scale * sum over j of topk_weights[t, j] * y[slot_row[t * top_k + j]] +
    addend[t], over the j whose slot has a row.

    Args:
        y: (num_rows, hidden_size), bfloat16, hidden_size contiguous and a multiple of 8, rows
            16-byte aligned; CUDA, or CPU for the slow reference. Rows sorted by expert, as
            `grouped_gemm` returns them. Rows without a slot are never read.
        slot_row: (num_tokens * top_k,), int32, contiguous, same device: the row of each slot, from
            `sort_tokens`. A slot without a row of `y`, such as -1, contributes nothing.
        topk_weights: (num_tokens, top_k), bfloat16 or float32, same device, any strides. None is
            1, for weights that were applied before.
        top_k: rows of a token, 1 to 32.
        addend: (num_tokens, hidden_size), bfloat16 or float32, same device, rows as those of `y`:
            what other experts make of the token. Not multiplied by `routed_scale`. None is 0.
        routed_scale: factor of the sum, taken in float32 and finite there.
        out_dtype: torch.bfloat16 (the default) or torch.float32.

    Returns:
        (num_tokens, hidden_size), `out_dtype`, contiguous. Added in float32 in the order of j,
        rounded once to `out_dtype`.

    Raises:
        ValueError: an argument differs from the above; the message has what was expected and what
            came.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        Bit for bit the same on CPU and CUDA, but for which NaN a NaN is. Does not synchronise on
        CUDA; safe in CUDA graphs. Deterministic. Inputs that require grad are accepted, backward
        raises: inference only.

    Example:
        >>> y = torch.ones(3, 8).bfloat16()
        >>> slot_row = torch.tensor([1, 0, -1, 2], dtype=torch.int32)
        >>> combine_tokens(y, slot_row, torch.full((2, 2), 0.5), top_k=2)[:, 0].tolist()
        [1.0, 0.5]
    """
    check_given("combine_tokens", "y", y)
    check_given("combine_tokens", "slot_row", slot_row)
    result: Tensor = call(
        _OP,
        (y, slot_row, topk_weights),
        {"top_k": top_k, "addend": addend, "routed_scale": routed_scale, "out_dtype": out_dtype},
    )
    return result


def _fake(
    y: Tensor, slot_row: Tensor, topk_weights: Tensor | None, *, top_k: int, **options: Any
) -> Tensor:
    check_combine_tokens(y, slot_row, topk_weights, top_k=top_k, has_memory=False, **options)
    return empty_output(y, slot_row, top_k, options.get("out_dtype"))


_OP = register(
    "combine_tokens",
    "(Tensor y, Tensor slot_row, Tensor? topk_weights, *, int top_k, Tensor? addend=None, "
    "float routed_scale=1.0, ScalarType? out_dtype=None) -> Tensor",
    run_combine_tokens,
    _fake,
)
