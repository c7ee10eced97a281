"""How published models choose experts and call them, from what their config.json says.

Read from the models' own code in Transformers; a model that is not here brings its routing along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ext._activations import CONCATENATED, INTERLEAVED
from moe_ext.nn._arguments import is_int, shown
from moe_ext.nn._pieces import quoted
from moe_ext.precision._checkpoint import CONFIG, Checkpoint
from moe_ext.precision._tensor_files import read_tensor
from moe_ext.routing import topk_routing

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")


class Family(NamedTuple):
    """What models of a kind share."""

    options: Callable[[Mapping[str, Any]], dict[str, Any]]  # of `topk_routing`, by the config
    router: str = "gate"  # beside the experts
    experts: Mapping[str, Any] = {}  # options of `Experts`


def _softmax(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"renormalize": bool(config["norm_topk_prob"])}


def _deepseek_v2(config: Mapping[str, Any]) -> dict[str, Any]:
    options = _softmax(config) | {"scale": float(config["routed_scaling_factor"])}
    if config["topk_method"] == "greedy":
        return options
    return options | {"num_groups": config["n_group"], "topk_groups": config["topk_group"]}


def _deepseek_v3(config: Mapping[str, Any]) -> dict[str, Any]:
    return _softmax(config) | {
        "scoring": "sigmoid",
        "scale": float(config["routed_scaling_factor"]),
        "num_groups": config["n_group"],
        "topk_groups": config["topk_group"],
    }


FAMILIES = {
    "mixtral": Family(lambda config: {"renormalize": True}),
    "qwen2_moe": Family(_softmax),
    "qwen3_moe": Family(_softmax),
    "qwen3_next": Family(_softmax),
    "olmoe": Family(_softmax),
    "deepseek_v2": Family(_deepseek_v2),
    "deepseek_v3": Family(_deepseek_v3),
    "kimi_k2": Family(_deepseek_v3),
    "glm4_moe": Family(_deepseek_v3),
    "gpt_oss": Family(
        lambda config: {"scoring": "softmax_topk"},
        router="router",
        experts={"activation": "swiglu_oai", "gate_up_layout": INTERLEAVED},
    ),
}
"""By `model_type`."""


def gate_up_layout_of(config: Mapping[str, Any]) -> str:
    """Return how packed gate and up of a model are laid out."""
    family = FAMILIES.get(config.get("model_type", ""))
    layout: str = CONCATENATED if family is None else family.experts.get("gate_up_layout", "")
    return layout or CONCATENATED


def expert_options(op: str, config: Mapping[str, Any], gated: bool) -> dict[str, Any]:
    """Return the options of `Experts` that a model's experts have."""
    family = FAMILIES.get(config.get("model_type", ""))
    if family is not None and family.experts:
        return dict(family.experts)
    activation = config.get("hidden_act", "silu")
    known = {"silu": "swiglu"} if gated else {"silu": "silu", "relu2": "relu2"}
    if activation not in known:
        raise ValueError(
            f"{op}: `hidden_act` of {CONFIG} must be one of {', '.join(map(quoted, known))} for "
            f"{'gated' if gated else 'ungated'} experts, got {shown(activation)}; `activation` "
            "may say it"
        )
    return {"activation": known[activation]}


class Router:
    """The router of one layer of a checkpoint."""

    def __init__(self, op: str, checkpoint: Checkpoint, config: Mapping[str, Any], layer: str):
        """Read its weights.

        Raises:
            ValueError: the model is not known, or something of its router is missing.
        """
        kind = config.get("model_type")
        family = FAMILIES.get(kind) if isinstance(kind, str) else None
        if family is None:
            raise ValueError(
                f"{op}: `model_type` of {CONFIG} must be one of {', '.join(FAMILIES)} where the "
                f"data has no topk_ids and topk_weights for {quoted(layer)}, got {shown(kind)}"
            )
        try:
            self._options = family.options(config)
        except KeyError as error:
            raise ValueError(
                f"{op}: {CONFIG} must say {quoted(error.args[0])}, as models of {kind} do, got none"
            ) from None
        except TypeError as error:
            raise ValueError(
                f"{op}: {CONFIG} must say in numbers how models of {kind} route, got: {error}"
            ) from None
        counts = [config[name] for name in _TOP_K if is_int(config.get(name))]
        if not counts:
            got = next((shown(config[name]) for name in _TOP_K if name in config), "none")
            raise ValueError(f"{op}: {CONFIG} must say {quoted(_TOP_K[0])}, an int, got {got}")
        self._top_k = counts[0]
        base = f"{layer.rpartition('.')[0]}.{family.router}"
        if f"{base}.weight" not in checkpoint.entries:
            raise ValueError(
                f"{op}: the checkpoint must have {quoted(f'{base}.weight')}, or the data topk_ids "
                f"and topk_weights for {quoted(layer)}, got neither"
            )
        self._weight = read_tensor(checkpoint.entries[f"{base}.weight"]).float()
        optional = {
            name: read_tensor(checkpoint.entries[name]).float()
            for name in (f"{base}.bias", f"{base}.e_score_correction_bias")
            if name in checkpoint.entries
        }
        self._bias = optional.get(f"{base}.bias")
        self._correction = optional.get(f"{base}.e_score_correction_bias")

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and ids, (num_tokens, top_k); the logits are float32."""
        logits = torch.nn.functional.linear(hidden_states.float(), self._weight, self._bias)
        return topk_routing(logits, self._top_k, correction_bias=self._correction, **self._options)
