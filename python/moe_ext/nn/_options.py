"""What the constructor of `Experts` takes, checked under the names that it has there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_ext._fused_moe_workspace import MAX_EXPERTS
from moe_ext._words import name_of
from moe_ext.nn._arguments import (
    check_bool,
    check_int,
    check_number,
    check_string,
    is_int,
    shown,
)
from moe_ext.nn._pieces import FP8, LAYOUTS, quoted

MULTIPLE = 8  # of sizes, as `fused_moe` asks: 16 bytes of BF16
_CHECKS = {
    "activation": check_string,
    "gate_up_layout": check_string,
    "accumulate": check_string,
    "first_expert": check_int,
    "routed_scale": check_number,
}
_MAY_BE_NONE = ("alpha", "limit")  # numbers; all others are bools


class LayerOptions:
    """The options of `fused_moe` that are no tensors, as attributes."""

    activation: str
    alpha: float | None
    limit: float | None
    gate_up_layout: str
    apply_router_weight_on_input: bool
    first_expert: int
    routed_scale: float
    accumulate: str
    batch_invariant: bool

    def _choices(self) -> dict[str, Any]:
        """Return them as keyword arguments."""
        return {
            "activation": self.activation,
            "alpha": self.alpha,
            "limit": self.limit,
            "gate_up_layout": self.gate_up_layout,
            "apply_router_weight_on_input": self.apply_router_weight_on_input,
            "first_expert": self.first_expert,
            "routed_scale": self.routed_scale,
            "accumulate": self.accumulate,
            "batch_invariant": self.batch_invariant,
        }


def check_kinds(op: str, options: Mapping[str, Any]) -> None:
    """Raise a ValueError for the first option that is not of its kind.

    Which values of a kind may be is left to `check_fused_moe`.
    """
    for name, value in options.items():
        if name in _MAY_BE_NONE:
            check_number(op, name, value, optional=True)
        else:
            _CHECKS.get(name, check_bool)(op, name, value)


def check_sizes(op: str, num_experts: Any, hidden_size: Any, intermediate_size: Any) -> None:
    """Raise a ValueError for the first size that `fused_moe` does not take."""
    if not is_int(num_experts) or not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(
            f"{op}: `num_experts` must be an int from 1 to {MAX_EXPERTS}, got {shown(num_experts)}"
        )
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    for name, size in sizes.items():
        if not is_int(size) or size < 1 or size % MULTIPLE:
            raise ValueError(
                f"{op}: `{name}` must be a positive int, a multiple of {MULTIPLE}, got "
                f"{shown(size)}"
            )


def check_dtype_and_scales(op: str, dtype: Any, scales: Any, static_scales: bool) -> None:
    """Raise a ValueError unless weights can be of a dtype and share scales so."""
    if dtype not in (torch.bfloat16, FP8):
        got = name_of(dtype) if isinstance(dtype, torch.dtype) else shown(dtype)
        raise ValueError(f"{op}: `dtype` must be torch.bfloat16 or torch.float8_e4m3fn, got {got}")
    if scales is not None and scales not in LAYOUTS:
        raise ValueError(
            f"{op}: `scales` must be None or one of {', '.join(map(quoted, LAYOUTS))}, got "
            f"{shown(scales)}"
        )
    if (dtype is FP8) != (scales is not None):
        raise ValueError(
            f"{op}: `scales` must be given for float8_e4m3fn weights, and for no others, got "
            f"{shown(scales)} for {name_of(dtype)}"
        )
    if static_scales and scales != "tensor":
        raise ValueError(
            f'{op}: `static_scales` must be False unless `scales` is "tensor", got True with '
            f"{shown(scales)}"
        )
