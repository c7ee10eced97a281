"""A bank as a safetensors file: its tensors, and its plan, sizes and options beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_ext._fused_moe_scales import weight_scale_of
from moe_ext._words import name_of
from moe_ext.nn._arguments import shown
from moe_ext.precision._files import load_tensors, save_tensors
from moe_ext.precision._plan_json import layer_value, read_layer
from moe_ext.precision.bank import ExpertBank

FORMAT = "moe_ext.expert_bank"
VERSION = 1
_Bank = TypeVar("_Bank", bound=ExpertBank)


def save_bank(bank: ExpertBank, path: str | Path) -> None:
    """Write a bank to a file."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "plan": layer_value(bank.plan),
        "hidden_size": bank.hidden_size,
        "intermediate_size": bank.intermediate_size,
        "options": bank._choices(),
    }
    save_tensors("ExpertBank.save", path, bank.state_dict(), header)


def load_bank(cls: type[_Bank], path: str | Path, device: torch.device | str | None) -> _Bank:
    """Read a bank from a file."""
    op = "ExpertBank.load"
    tensors, header = load_tensors(op, path, FORMAT, VERSION, device)
    for key in ("plan", "hidden_size", "intermediate_size", "options"):
        if key not in header:
            raise ValueError(f"{op}: the file must say {key!r}, got {', '.join(header)}")
    bank = cls(
        read_layer("plan", header["plan"]),
        header["hidden_size"],
        header["intermediate_size"],
        device="meta",
        static_scales="a1_scale" in tensors,
        bias=any(name.endswith("_bias") for name in tensors),
        **header["options"],
    )
    expected = {**bank.state_dict()}
    # The down GEMM's bias is with one of the ranks alone.
    optional = {name for name in expected if name.startswith("w2_") and name.endswith("_bias")}
    for name, like in expected.items():
        tensor = tensors.get(name)
        if tensor is None and name in optional:
            bank.register_parameter(name, None)
        elif tensor is None or not _fits(name, tensor, like, expected):
            got = "none" if tensor is None else f"{name_of(tensor.dtype)} {tuple(tensor.shape)}"
            raise ValueError(
                f"{op}: `{name}` must be {name_of(like.dtype)} {tuple(like.shape)}, got {got}"
            )
    unknown = set(tensors) - set(expected)
    if unknown:
        raise ValueError(f"{op}: the file must hold nothing else, got {shown(sorted(unknown))}")
    bank._set_tensors(tensors)
    bank._align_rows()
    bank._set_maps(next(iter(tensors.values())).device)
    return bank


def _fits(name: str, tensor: Tensor, like: Tensor, expected: dict[str, Any]) -> bool:
    if name.endswith("_bias"):
        return tensor.shape == like.shape and tensor.dtype in (torch.bfloat16, torch.float32)
    if name.endswith("_fp8_scale") and tensor.dim() != like.dim():
        # Gate and up of a checkpoint may share a grid of blocks.
        weight = expected[name.removesuffix("_scale")]
        layout = weight_scale_of(tuple(tensor.shape), *weight.shape)
        blocks = layout is not None and layout.granularity == "1x128" and like.dim() > 2
        return blocks and tensor.dtype is like.dtype
    return tensor.shape == like.shape and tensor.dtype is like.dtype
