"""The op `moe_ext::sort_tokens`: contract, registration."""

from __future__ import annotations

from torch import Tensor

from moe_ext._call import call
from moe_ext._register import register
from moe_ext._sort_checks import check_sort_tokens
from moe_ext._sort_run import empty_outputs, run_sort_tokens
from moe_ext._words import check_given


def sort_tokens(
    topk_ids: Tensor,
    num_experts: int,
    *,
    first_expert: int = 0,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices of all tokens by expert, as the rows of `grouped_gemm` are.

    Slot t * top_k + j is choice j of token t. The rows of an expert are its slots, in their order.

    Args:
        topk_ids: (num_tokens, top_k), int32 or int64, top_k 1 to 32 and contiguous, any stride
            between tokens; CUDA, or CPU for the slow reference. May hold anything: ids without an
            expert here (another rank's, -1, garbage) are dropped. The same id twice is two rows.
        num_experts: experts here, 1 to 4,096.
        first_expert: the ids here are first_expert to first_expert + num_experts - 1.
        expert_map: (num_global,), int32, contiguous, same device: the expert here of each id, from
            0, or anything else, such as -1, where it has none. Ids from num_global on have none.
            Not with `first_expert`.

    Returns:
        `offs`: (num_experts,), int32: end row of each expert, as `grouped_gemm` takes them.
        `row_slot`: (num_tokens * top_k,), int32: the slot of each row, so that `row_slot // top_k`
        is its token; -1 from row offs[-1] on. `slot_row`: (num_tokens * top_k,), int32: the row of
        each slot, as `combine_tokens` takes them; -1 where dropped.

    Raises:
        ValueError: an argument differs from the above; the message has what was expected and what
            came.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        The same on CPU and CUDA. Does not synchronise on CUDA; safe in CUDA graphs (ids may change
        between replays). Deterministic.

    Example:
        >>> import torch
        >>> offs, row_slot, slot_row = sort_tokens(torch.tensor([[1, 0], [2, 1]]), 2)
        >>> offs.tolist(), row_slot.tolist(), slot_row.tolist()
        ([1, 3], [1, 0, 3, -1], [1, 0, -1, 2])
    """
    check_given("sort_tokens", "topk_ids", topk_ids)
    result: tuple[Tensor, Tensor, Tensor] = call(
        _OP, (topk_ids, num_experts), {"first_expert": first_expert, "expert_map": expert_map}
    )
    return result


def _fake(
    topk_ids: Tensor, num_experts: int, *, first_expert: int = 0, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    check_sort_tokens(topk_ids, num_experts, first_expert=first_expert, expert_map=expert_map)
    return empty_outputs(topk_ids, num_experts)


_OP = register(
    "sort_tokens",
    "(Tensor topk_ids, int num_experts, *, int first_expert=0, Tensor? expert_map=None) -> "
    "(Tensor offs, Tensor row_slot, Tensor slot_row)",
    run_sort_tokens,
    _fake,
)
