"""Modules of experts in every form that Transformers' decorator knows, and what they must give."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 6, 2, 64, 48, 17


def _forward(self: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """One token and choice after the other, as the contract reads; ids of others add nothing."""
    out = torch.zeros_like(hidden)
    for token in range(ids.shape[0]):
        for choice, expert in enumerate(ids[token].tolist()):
            if 0 <= expert < self.num_experts:
                columns = weights.shape[1] != ids.shape[1]
                weight = weights[token, expert if columns else choice]
                out[token] += weight * self.one(hidden[token], expert)
    return out


def _one(self: Any, x: Tensor, expert: int) -> Tensor:
    name = "gate_up_proj" if self.has_gate else "up_proj"
    for step, part in enumerate((name, "down_proj")):
        weight = getattr(self, part)[expert]
        x = (weight.T if self.is_transposed else weight) @ x
        if self.has_bias:
            x = x + getattr(self, f"{part}_bias")[expert]
        if step == 0:
            x = self._apply_gate(x[None])[0] if self.has_gate else self.act_fn(x)
    return x


def make_experts(
    device: str = "cpu",
    *,
    act: str = "silu",
    gate: Any = None,
    attributes: dict[str, Any] | None = None,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    **form: bool,
) -> Any:
    """Make a module of a class of its own with random weights in bfloat16.

    Args:
        device: where its weights are.
        act: key of Transformers' activations.
        gate: its own `_apply_gate`, None for the default.
        attributes: others that the module has.
        hidden: columns of a token.
        intermediate: columns between the two matrices.
        form: `is_transposed`, `is_concatenated`, `has_bias`, `has_gate`.
    """

    def init(self: Any, config: Any) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.act_fn = EXPERTS, ACT2FN[act]
        for name, value in (attributes or {}).items():
            setattr(self, name, value)
        gated = form.get("has_gate", True)
        n = 2 * intermediate if gated else intermediate
        generator = torch.Generator().manual_seed(3)
        for name, rows, columns in (
            ("gate_up_proj" if gated else "up_proj", n, hidden),
            ("down_proj", hidden, intermediate),
        ):
            values = torch.randn(EXPERTS, rows, columns, generator=generator) * 2 / columns**0.5
            values = values.transpose(1, 2) if form.get("is_transposed") else values
            setattr(self, name, nn.Parameter(values.contiguous().bfloat16(), requires_grad=False))
            bias = torch.randn(EXPERTS, rows, generator=generator).bfloat16()
            if form.get("has_bias"):
                setattr(self, f"{name}_bias", nn.Parameter(bias, requires_grad=False))

    members = {"__init__": init, "forward": _forward, "one": _one}
    if gate is not None:
        members["_apply_gate"] = gate
    made = use_experts_implementation(type("OwnExperts", (nn.Module,), members), **form)
    config = PretrainedConfig()
    config._experts_implementation = "moe_ext"
    return made(config).to(device)


def make_fp8_experts(
    device: str = "cpu",
    *,
    block_size: tuple[int, int] | None = (128, 128),
    activation_scheme: str = "dynamic",
    intermediate: int = 256,
    hidden: int = 256,
    **config: Any,
) -> Any:
    """Make Transformers' own FP8 experts with random weights and scales."""
    own = PretrainedConfig(
        hidden_size=hidden,
        num_local_experts=EXPERTS,
        moe_intermediate_size=intermediate,
        hidden_act="silu",
        **config,
    )
    own._experts_implementation = "moe_ext"
    made = use_experts_implementation(FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    experts = made(own, block_size=block_size, activation_scheme=activation_scheme)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in list(experts.named_parameters()):
        if name.endswith("scale_inv"):
            columns = getattr(experts, name.removesuffix("_scale_inv")).shape[-1]
            # About 100 is the size of the FP8 values below.
            values = (0.5 + torch.rand(parameter.shape, generator=generator)) * 0.01 / columns**0.5
        else:
            values = torch.randn(parameter.shape, generator=generator).mul(100).clamp(-448, 448)
        parameter.requires_grad_(False).copy_(values.to(parameter.dtype))
    return experts.to(device)


def dequantized(experts: Any) -> Any:
    """Return a copy in float32 whose weights are those of FP8 experts, times their scales."""
    exact = copy.deepcopy(experts).cpu()
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(exact, name).float()
        scale = getattr(exact, f"{name}_scale_inv").float()
        rows, columns = (
            torch.arange(size) // (128 if exact.block_size else max(size // parts, 1))
            for size, parts in zip(weight.shape[1:], scale.shape[1:], strict=True)
        )
        if exact.block_size and scale.shape[1] == 2 and weight.shape[1] <= 128:
            rows = torch.arange(weight.shape[1]) // (weight.shape[1] // 2)
        expanded = scale[:, rows][:, :, columns]
        setattr(exact, name, nn.Parameter(weight * expanded, requires_grad=False))
    return exact


def routed(device: str = "cpu", hidden: int = HIDDEN) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states, ids and weights."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(TOKENS, hidden, generator=generator).bfloat16()
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    weights, ids = logits.softmax(1).topk(TOP_K, dim=1)
    return x.to(device), ids.to(device), weights.to(device)


@torch.no_grad()
def expected_of(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the output by the module's own forward in float32, on its device."""
    exact = copy.deepcopy(experts).cpu().float()
    exact.config._experts_implementation = "eager"
    return exact(x.cpu().float(), ids.cpu(), weights.cpu().float()).to(x.device)
