"""Scales of a layer's FP8 weights: which shapes there are, and how activations are quantised."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext._activations import CONCATENATED
from moe_ext._math import ceil_div
from moe_ext._scales import SCALE_BLOCK
from moe_ext._words import device_message, name_of


class WeightScale(NamedTuple):
    """What the shape of a weight's scale says."""

    # Of the activations that meet the weight, as `quantize_fp8` names it. Only with "tensor" may
    # their scale be given; where it is not, they have one for each row.
    granularity: str
    n_segments: int = 1  # 2 where gate and up have block grids of their own


def weight_scale_of(shape: tuple[int, ...], num_experts: int, n: int, k: int) -> WeightScale | None:
    """Tell the layout of the scales of a weight (num_experts, n, k), None where it is none.

    One scale for each expert asks for a given scale of all activations or else one of each row, one
    for each channel for one of each row, one for each block for one of each 128 values of a row.
    The C++ op has a twin of this, csrc/fused_moe/weight_scale.hpp.
    """
    if shape in ((), (1,), (num_experts,), (num_experts, 1), (num_experts, 1, 1)):
        return WeightScale("tensor")
    if shape in ((num_experts, n), (num_experts, n, 1)):
        return WeightScale("row")
    by_block, by_segment = block_shapes(num_experts, n, k)
    if shape == by_block:
        return WeightScale("1x128")
    return WeightScale("1x128", 2) if shape == by_segment else None


def block_shapes(num_experts: int, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of block scales with one grid, and with one for each half of n."""
    along_k = ceil_div(k, SCALE_BLOCK)
    whole = (num_experts, ceil_div(n, SCALE_BLOCK), along_k)
    return whole, (num_experts, 2, ceil_div(n // 2, SCALE_BLOCK), along_k)


def check_weight_scale(
    op: str, argument: str, scale: Tensor, weight: Tensor, segments: bool
) -> WeightScale:
    """Raise a ValueError unless `scale` has a layout; `segments` is whether it may have two."""
    num_experts, n, k = weight.shape
    shape = tuple(scale.shape)
    layout = weight_scale_of(shape, num_experts, n, k)
    if layout is not None and (segments or layout.n_segments == 1):
        return layout
    by_block, by_segment = block_shapes(num_experts, n, k)
    apart = f" or, with grids of gate and up apart, {by_segment}" if segments else ""
    raise ValueError(
        f"{op}: `{argument}` must have shape () or (num_experts,) = ({num_experts},), per channel "
        f"({num_experts}, {n}) or ({num_experts}, {n}, 1), or per block of 128 x 128 {by_block}"
        f"{apart}, got {shape}"
    )


def check_scales(
    op: str,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    a1_scale: Tensor | None,
    a2_scale: Tensor | None,
    gated: bool,
    gate_up_layout: str,
) -> tuple[WeightScale | None, WeightScale | None]:
    """Return the layouts of the weights' scales, None for BF16."""
    if w13.dtype is torch.bfloat16:
        for argument, scale in (
            ("w13_scale", w13_scale),
            ("w2_scale", w2_scale),
            ("a1_scale", a1_scale),
            ("a2_scale", a2_scale),
        ):
            if scale is not None:
                raise ValueError(
                    f"{op}: `{argument}` must be None for bfloat16 weights, got shape "
                    f"{tuple(scale.shape)}"
                )
        return None, None
    layouts = []
    for weight, number, scale, static in (
        (w13, "13", w13_scale, a1_scale),
        (w2, "2", w2_scale, a2_scale),
    ):
        argument = f"w{number}_scale"
        if scale is None:
            raise ValueError(
                f"{op}: `{argument}` must be given for float8_e4m3fn weights, got None"
            )
        _check_float32(op, argument, scale, w13)
        halves = number == "13" and gated
        layout = check_weight_scale(op, argument, scale, weight, segments=halves)
        if layout.n_segments == 2 and gate_up_layout != CONCATENATED:
            raise ValueError(
                f"{op}: `{argument}` must have one grid of blocks for the gate_up_layout "
                f'"{gate_up_layout}", got shape {tuple(scale.shape)}'
            )
        if static is not None:
            _check_static_scale(op, f"a{number[0]}_scale", static, argument, layout, w13)
        layouts.append(layout)
    return layouts[0], layouts[1]


def _check_static_scale(
    op: str, argument: str, scale: Tensor, of_weight: str, layout: WeightScale, like: Tensor
) -> None:
    _check_float32(op, argument, scale, like)
    if layout.granularity != "tensor":
        raise ValueError(
            f"{op}: `{argument}` must be None unless `{of_weight}` is per tensor or expert, got "
            f"shape {tuple(scale.shape)}"
        )
    if tuple(scale.shape) not in ((), (1,)):
        raise ValueError(f"{op}: `{argument}` must have shape () or (1,), got {tuple(scale.shape)}")


def _check_float32(op: str, argument: str, scale: Tensor, like: Tensor) -> None:
    if scale.dtype is not torch.float32:
        raise ValueError(f"{op}: `{argument}` must be float32, got {name_of(scale.dtype)}")
    if scale.device != like.device:
        raise ValueError(device_message(op, argument, scale, "hidden_states", like))


def check_accumulate(
    op: str, accumulate: str, layouts: tuple[WeightScale | None, WeightScale | None]
) -> None:
    if accumulate not in ("promoted", "fast"):
        raise ValueError(f'{op}: `accumulate` must be "promoted" or "fast", got "{accumulate}"')
    if accumulate == "promoted":
        return
    why = None
    if layouts[0] is None:
        why = "bfloat16 weights, which always accumulate in float32"
    elif any(layout is not None and layout.granularity == "1x128" for layout in layouts):
        why = "scales per block, which every sum of 128 is multiplied by"
    if why is not None:
        raise ValueError(
            f'{op}: `accumulate` must be "promoted" (the default) with {why}, got "{accumulate}"'
        )
