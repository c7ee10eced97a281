"""A call of experts: leading dimensions that fit one another, and tensors as rows."""

from __future__ import annotations

from torch import Tensor

from moe_ext.nn._arguments import check_hidden_states, check_tensor


def check_call(
    op: str,
    hidden_size: int,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    addend: Tensor | None,
    expert_map: Tensor | None,
    out: Tensor | None,
    workspace: Tensor | None,
) -> None:
    """Raise a ValueError for the first argument that is no tensor of the right leading dimensions.

    What else is asked of them is left to `fused_moe`.
    """
    check_hidden_states(op, hidden_states, hidden_size)
    leading = hidden_states.shape[:-1]
    check_tensor(op, "expert_map", expert_map, optional=True)
    check_tensor(op, "workspace", workspace, optional=True)
    for name, tensor, last in (
        ("topk_weights", topk_weights, "top_k"),
        ("topk_ids", topk_ids, "top_k"),
        ("addend", addend, "hidden_size"),
        ("out", out, "hidden_size"),
    ):
        check_tensor(op, name, tensor, optional=last == "hidden_size")
        if tensor is not None and tensor.dim() == 0:
            raise ValueError(f"{op}: `{name}` must have shape (..., {last}), got ()")
        if tensor is not None and tensor.shape[:-1] != leading:
            raise ValueError(
                f"{op}: `{name}` must have the leading dimensions {tuple(leading)} of "
                f"`hidden_states`, got shape {tuple(tensor.shape)}"
            )


def rows_of(tensor: Tensor) -> Tensor:
    """Return (..., n) as (rows, n)."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def rows_of_out(op: str, out: Tensor) -> Tensor:
    """Return (..., n) as (rows, n), the same memory."""
    if out.dim() == 2:
        return out
    if not out.is_contiguous():
        raise ValueError(
            f"{op}: `out` must be contiguous where it has {out.dim()} dimensions, got strides "
            f"{out.stride()} for shape {tuple(out.shape)}"
        )
    return out.view(-1, out.shape[-1])
