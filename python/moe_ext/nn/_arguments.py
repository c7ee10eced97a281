"""Arguments of the wrong kind are refused by name: what was expected, and what came."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moe_ext.nn._pieces import quoted


def shown(value: Any) -> str:
    """Return what came as a message has it: short values as users write them, others by type."""
    if isinstance(value, str):
        return quoted(value)
    if value is None or isinstance(value, (bool, int, float, tuple, list)):
        return repr(value)
    return type(value).__name__


def is_int(value: Any) -> bool:
    """Whether a value is an int, which a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_int(op: str, name: str, value: Any, *, optional: bool = False) -> None:
    """Raise a ValueError unless a value is an int, or None where that may be."""
    if not is_int(value) and not (optional and value is None):
        raise ValueError(f"{op}: `{name}` must be {_or_none(optional)}an int, got {shown(value)}")


def check_number(op: str, name: str, value: Any, *, optional: bool = False) -> None:
    """Raise a ValueError unless a value is an int or float, or None where that may be."""
    if not is_int(value) and not isinstance(value, float) and not (optional and value is None):
        raise ValueError(f"{op}: `{name}` must be {_or_none(optional)}a number, got {shown(value)}")


def check_bool(op: str, name: str, value: Any, *, optional: bool = False) -> None:
    """Raise a ValueError unless a value is a bool, or None where that may be."""
    if not isinstance(value, bool) and not (optional and value is None):
        none = "None, " if optional else ""
        raise ValueError(f"{op}: `{name}` must be {none}True or False, got {shown(value)}")


def check_string(op: str, name: str, value: Any, *, optional: bool = False) -> None:
    """Raise a ValueError unless a value is a string, or None where that may be."""
    if not isinstance(value, str) and not (optional and value is None):
        raise ValueError(f"{op}: `{name}` must be {_or_none(optional)}a string, got {shown(value)}")


def check_tensor(op: str, name: str, value: Any, *, optional: bool = False) -> None:
    """Raise a ValueError unless a value is a tensor, or None where that may be."""
    if not isinstance(value, Tensor) and not (optional and value is None):
        raise ValueError(f"{op}: `{name}` must be {_or_none(optional)}a tensor, got {shown(value)}")


def check_module(op: str, name: str, value: Any) -> None:
    """Raise a ValueError unless a value is None or an `nn.Module`."""
    if value is not None and not isinstance(value, nn.Module):
        raise ValueError(f"{op}: `{name}` must be None or an nn.Module, got {shown(value)}")


def check_hidden_states(op: str, hidden_states: Any, hidden_size: int) -> None:
    """Raise a ValueError unless a value is a tensor (..., hidden_size)."""
    check_tensor(op, "hidden_states", hidden_states)
    if hidden_states.dim() == 0 or hidden_states.shape[-1] != hidden_size:
        raise ValueError(
            f"{op}: `hidden_states` must have shape (..., hidden_size) = (*, {hidden_size}), got "
            f"{tuple(hidden_states.shape)}"
        )


def check_selection(
    op: str, num_experts: Any, first_expert: Any, num_local: Any, intermediate_range: Any
) -> None:
    """Raise a ValueError unless what says which part of a layer is wanted is of the right kind."""
    check_int(op, "num_experts", num_experts, optional=True)
    check_int(op, "first_expert", first_expert)
    check_int(op, "num_local", num_local, optional=True)
    if intermediate_range is None:
        return
    is_pair = isinstance(intermediate_range, (tuple, list)) and len(intermediate_range) == 2
    if not is_pair or not all(map(is_int, intermediate_range)):
        raise ValueError(
            f"{op}: `intermediate_range` must be None or (begin, end), two ints, got "
            f"{shown(intermediate_range)}"
        )


def _or_none(optional: bool) -> str:
    return "None or " if optional else ""
