"""Tiny random models of every class of Transformers that uses its registry of experts."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from moe_ext.integrations.transformers import register
from torch import Tensor, nn

from support.tolerance import dissimilarity

VOCABULARY = 96
# Names of the same size differ from model to model; each takes those that its configuration has.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_k": 2,
    "enable_moe_block": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "max_position_embeddings": 128,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 1,
    "chunk_size": 16,
    "router_hidden_size": 16,
    "hc_sinkhorn_iters": 3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Where a model asks for more than sizes.
MORE: dict[str, dict[str, Any]] = {
    "axk2": {"num_key_value_heads": 4},
    "deepseek_ocr2": {"num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v32": {"num_key_value_heads": 4},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [48, 48],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    },
    "glm4v_moe": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 2],
        },
    },
    "glm5_next": {
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 0,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "glm_moe_dsa": {"num_key_value_heads": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "moe"]},
    "zaya": {"num_experts_per_tok": 1},
}
# What a configuration lacks and its model reads.
EXTRA: dict[str, dict[str, Any]] = {"qwen3_omni_moe": {"shared_expert_intermediate_size": 48}}
Call = tuple[nn.Module, Tensor, Tensor, Tensor]
_DECORATED = re.compile(r"^@use_experts_implementation(?:\([^)]*\))?\nclass (\w+)", re.MULTILINE)
# What of a package is a model of its own that reads token ids, best first.
_SUFFIXES = ("ForCausalLM", "TextModel", "ForTokenClassification", "TalkerModel")


@dataclasses.dataclass(frozen=True)
class ModelClass:
    """One class of experts, and a model of its package that has it."""

    package: str
    experts: str

    def __str__(self) -> str:
        """Return the name of the experts, by which tests are called."""
        return self.experts


def registry_classes() -> list[ModelClass]:
    """Find every class of experts that the installed Transformers sends through its registry."""
    root = Path(transformers.__file__).parent / "models"
    return [
        ModelClass(path.parent.name, name)
        for path in sorted(root.glob("*/modeling_*.py"))
        for name in _DECORATED.findall(path.read_text())
    ]


def recorded_routing(model: nn.Module, run: Callable[[], Tensor]) -> tuple[list[Call], Tensor]:
    """Return the calls of modules of experts with their arguments, in order, and the output."""
    calls: list[Call] = []
    hooks = [
        experts.register_forward_pre_hook(lambda module, given: calls.append((module, *given)))
        for experts in experts_of(model)
    ]
    try:
        return calls, run()
    finally:
        for hook in hooks:
            hook.remove()


def pinned_routing(model: nn.Module, calls: list[Call], run: Callable[[], Tensor]) -> Tensor:
    """Run a model with ids and weights of recorded calls.

    Where two experts of a token are almost equally good, another rounding before the router makes
    another choice, and other logits, which says nothing of the experts.
    """
    recorded = iter(calls)

    def pin(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        *_, ids, weights = next(recorded)
        return given[0], ids, weights

    hooks = [experts.register_forward_pre_hook(pin) for experts in experts_of(model)]
    try:
        return run()
    finally:
        for hook in hooks:
            hook.remove()


def tiny_model(made: ModelClass, device: str = "cpu") -> nn.Module:
    """Make the model with experts that matter to its output, in bfloat16, in eager mode."""
    module = importlib.import_module(f"transformers.models.{made.package}.modeling_{made.package}")
    model_class = _model_class(made, module)
    configuration = _configuration(made, model_class.config_class)
    configuration._experts_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(configuration).to(torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(1)
    for experts in experts_of(model):
        for name, parameter in experts.named_parameters(recurse=False):
            values = torch.randn(parameter.shape, generator=generator)
            # Outputs about as large as inputs, which are about 1 behind a norm.
            size = 0.2 if name.endswith("bias") else 1.5 * min(parameter.shape[1:]) ** -0.5
            parameter.data.copy_(values * size)
    for _, parameter in model.named_parameters():
        parameter.requires_grad_(False)
    return model.to(device)


def experts_of(model: nn.Module) -> list[Any]:
    """Return the modules of experts that the registry serves."""
    return [module for module in model.modules() if hasattr(module, "is_concatenated")]


def tokens(device: str, batch: int = 2, length: int = 12) -> Tensor:
    """Draw token ids."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator).to(device)


@torch.no_grad()
def output_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits, or the hidden states of a model that has none, in float32."""
    # The talker of Qwen3-Omni reads embeddings, its own or its thinker's.
    is_talker = hasattr(model, "codec_embedding")
    given = {"inputs_embeds": model.codec_embedding(ids)} if is_talker else {"input_ids": ids}
    result = model(**given, use_cache=False)
    out = result.logits if hasattr(result, "logits") else result.last_hidden_state
    return out.float()


@dataclasses.dataclass(frozen=True)
class Closeness:
    """How far logits are from those of float32: 1 - 2<x, y> / (|x|^2 + |y|^2)."""

    eager: float
    ours: float
    without_experts: float

    @property
    def passes(self) -> bool:
        """Whether moe_ext is as close as eager, in a model whose experts matter.

        Twice eager's distance: both round, at other places.
        """
        return self.ours <= 2 * self.eager and self.without_experts > 100 * self.ours


def closeness(made: ModelClass, device: str) -> Closeness:
    """Run a tiny model in eager mode, by moe_ext, in float32, and with experts that give zeros."""
    model, ids = tiny_model(made, device), tokens(device)
    assert made.experts in {type(module).__name__ for module in experts_of(model)}
    calls, eager = recorded_routing(model, lambda: output_of(model, ids))
    exact_model = copy.deepcopy(model).float()
    exact = pinned_routing(exact_model, calls, lambda: output_of(exact_model, ids))
    register(model)
    ours = pinned_routing(model, calls, lambda: output_of(model, ids))
    with torch.no_grad():
        for experts in experts_of(model):
            experts.down_proj.zero_()
    without = pinned_routing(model, calls, lambda: output_of(model, ids))
    return Closeness(*(dissimilarity(out, exact) for out in (eager, ours, without)))


MODEL_CLASSES = registry_classes()


def _model_class(made: ModelClass, module: ModuleType) -> Any:
    prefix = made.experts.removesuffix("TextExperts").removesuffix("Experts")
    models = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, transformers.PreTrainedModel)
        and value.__module__ == module.__name__
        and not name.endswith("PreTrainedModel")
    ]
    own = [model for model in models if model.__name__.startswith(prefix)] or models
    for suffix in _SUFFIXES:
        for model in own:
            if model.__name__.endswith(suffix):
                return model
    raise LookupError(f"{made.package} must have a model that reads ids, got {models}")


def _configuration(made: ModelClass, configuration_class: Any) -> Any:
    fields = {field.name for field in dataclasses.fields(configuration_class)}
    chosen = {name: value for name, value in SIZES.items() if name in fields}
    configuration = configuration_class(**(chosen | MORE.get(made.package, {})))
    for name, value in EXTRA.get(made.package, {}).items():
        setattr(configuration, name, value)
    return configuration
