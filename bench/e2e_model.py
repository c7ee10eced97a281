"""Qwen3-30B-A3B of Transformers with random weights made on the device, in BF16 or FP8 experts."""

from __future__ import annotations

from typing import Any

import torch
from moe_ext import quantize_fp8
from torch import Tensor, nn
from transformers import FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.finegrained_fp8 import (
    ALL_FP8_EXPERTS_FUNCTIONS,
    replace_with_fp8_linear,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from bench.e2e_rows import MODEL

TINY = "qwen3-tiny"
STUB = "bench_stub"
BLOCK = 128
SIZES: dict[str, dict[str, Any]] = {
    MODEL: {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    TINY: {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 2048,
    },
}
_STD = 0.02


@torch.no_grad()
def make_model(name: str, device: torch.device) -> Any:
    """Make the model in BF16, all of it on the device."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES[name], tie_word_embeddings=False, use_cache=True)
    with device:  # parameters and buffers are allocated, and filled, where they stay
        model = Qwen3MoeForCausalLM._from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.normal_(std=_STD)
        else:
            parameter.fill_(1)
    return model


@torch.no_grad()
def to_fp8(model: Any, device: torch.device) -> None:
    """Put FP8 experts with scales per 128 x 128 in place of the model's; the rest stays BF16."""
    own = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK))
    others = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    replace_with_fp8_linear(model, modules_to_not_convert=others, quantization_config=own)
    for experts in experts_of(model):
        for name in ("gate_up_proj", "down_proj"):
            shape = getattr(experts, name).shape
            weight = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=_STD)
            values, scale = quantize_fp8(weight, "128x128")
            setattr(experts, name, nn.Parameter(values, requires_grad=False))
            setattr(experts, f"{name}_scale_inv", nn.Parameter(scale, requires_grad=False))


def experts_of(model: nn.Module) -> list[Any]:
    """Return the modules of experts."""
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def register_stub() -> None:
    """Make experts that return their input known to Transformers, under the name `STUB`."""
    for registry in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
        registry.register(STUB, _stub)


def _stub(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return hidden_states


@torch.no_grad()
def experts_error(model: Any, num_tokens: int = 16) -> float:
    """Run the first experts as they are set, and compare with float32 in plain PyTorch.

    Returns:
        The largest absolute difference over the largest absolute reference value.
    """
    experts = experts_of(model)[0]
    generator = torch.Generator(experts.down_proj.device).manual_seed(0)
    num_experts, hidden, _ = experts.down_proj.shape
    top_k: int = model.config.num_experts_per_tok
    device = experts.down_proj.device
    x = torch.randn(num_tokens, hidden, generator=generator, device=device).bfloat16()
    logits = torch.randn(num_tokens, num_experts, generator=generator, device=device)
    weights, ids = logits.softmax(1).topk(top_k, dim=1)
    weights = weights.bfloat16()
    expected = torch.zeros(num_tokens, hidden, device=device)
    for expert in range(num_experts):
        rows, choices = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[rows].float() @ _matrix(experts, "gate_up_proj", expert).T).chunk(2, dim=1)
        out = (nn.functional.silu(gate) * up) @ _matrix(experts, "down_proj", expert).T
        expected.index_add_(0, rows, out * weights[rows, choices, None].float())
    out = experts(x, ids, weights).float()
    return float((out - expected).abs().max() / expected.abs().max())


def _matrix(experts: Any, name: str, expert: int) -> Tensor:
    weight: Tensor = getattr(experts, name)[expert].float()
    if not hasattr(experts, f"{name}_scale_inv"):
        return weight
    scale: Tensor = getattr(experts, f"{name}_scale_inv")[expert]
    expanded = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight * expanded[: weight.shape[0], : weight.shape[1]]
