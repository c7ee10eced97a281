"""Checkpoints that `moe-ext convert` wrote, as a method of quantisation that Transformers knows.

Transformers loads everything but the experts of the plan's layers. These are made of the checkpoint
layer by layer, as banks, when the rest is in its place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_ext._activations import CONCATENATED
from moe_ext.integrations.transformers._forward import weights_of
from moe_ext.integrations.transformers._gates import checked_gate
from moe_ext.integrations.transformers._pack import is_experts
from moe_ext.precision._plan_json import check_version
from moe_ext.precision._tensor_files import read_header
from moe_ext.precision.bank import ExpertBank
from moe_ext.precision.convert import METHOD, VERSION
from moe_ext.precision.plan import PrecisionPlan


class ConvertedConfig(QuantizationConfigMixin):  # type: ignore[misc]  # Transformers has no types
    """What config.json says of such a checkpoint."""

    def __init__(self, plan: str, quant_method: str = METHOD, version: Any = 1, **_: Any) -> None:
        """Keep the name of the plan's file; raise a ValueError for versions that are not known."""
        check_version("moe_ext", "quantization_config.version", version, VERSION)
        self.quant_method = quant_method
        self.version = version
        self.plan = plan


class _Layer(NamedTuple):
    """A layer of the plan: its names in checkpoint and model, and what lies between its GEMMs."""

    name: str
    module: str
    gate: dict[str, Any]


class BankedExperts(nn.Module):
    """A bank in the place of a module of experts."""

    bank: ExpertBank

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts; arguments as `experts_forward` has them."""
        weights = weights_of(top_k_index, top_k_weights)
        out: Tensor = self.bank(hidden_states.to(torch.bfloat16), weights, top_k_index)
        return out.to(hidden_states.dtype)


class ConvertedQuantizer(HfQuantizer):  # type: ignore[misc]
    """Makes banks of the layers of the plan while a model is loaded."""

    requires_calibration = True

    def __init__(self, quantization_config: ConvertedConfig, **options: Any) -> None:
        """Begin without layers."""
        super().__init__(quantization_config, **options)
        self._directory = Path()
        self._layers: list[_Layer] = []

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        """Take the experts of the plan's layers out, so that nothing is loaded into them."""
        if not checkpoint_files:
            raise ValueError(
                "moe_ext: a converted checkpoint must be loaded from its folder, got no files"
            )
        for file in checkpoint_files:  # what is wrong with one Transformers says without its name
            read_header("moe_ext", Path(file))
        self._directory = Path(checkpoint_files[0]).parent
        plan = PrecisionPlan.load(self._directory / self.quantization_config.plan)
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        for name in plan.names:
            module_name = _experts_of(model, name)
            gate = checked_gate(model.get_submodule(module_name), torch.device("cpu"))
            # `convert` writes gate and up apart, whatever the model has.
            gate = gate._replace(gate_up_layout=CONCATENATED)
            self._layers.append(_Layer(name, module_name, gate._asdict()))
            model.set_submodule(module_name, BankedExperts())
            ignored |= {rf"^{re.escape(own)}\." for own in (name, module_name)}
        model._keys_to_ignore_on_load_unexpected = ignored

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        """Read the banks, each to the device of the module that it is in."""
        for layer in self._layers:
            around = model.get_submodule(layer.module.rpartition(".")[0])
            device = next(iter([*around.parameters(), *model.parameters()])).device
            if device.type == "meta":
                raise ValueError(
                    f"moe_ext: {layer.module} must stay on a GPU or the CPU, got a place that "
                    "accelerate fills with each call"
                )
            bank = ExpertBank.from_checkpoint(
                self._directory, layer.name, device=device, **layer.gate
            )
            model.get_submodule(layer.module).bank = bank
        return model

    def is_serializable(self) -> bool:
        """Whether `save_pretrained` can write it: no, copy the folder."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether it can be trained."""
        return False


def _experts_of(model: Any, name: str) -> str:
    """Return the name of the module of experts that a layer of a plan is.

    Where the model names it otherwise than its checkpoints do, as Mixtral's: the one of its block.
    """
    every: list[str] = [own for own, module in model.named_modules() if is_experts(module)]
    if name in every:
        return name
    block = re.match(r".*\blayers\.\d+\.", name)
    alike = [own for own in every if block is not None and own.startswith(block.group())]
    if len(alike) != 1:
        raise ValueError(
            f"moe_ext: the plan's layer {name!r} must be one module of experts of "
            f"{type(model).__name__}, got {len(alike)}"
        )
    return alike[0]


def register_converted() -> None:
    """Make the method known, once."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, ConvertedConfig)
    AUTO_QUANTIZER_MAPPING.setdefault(METHOD, ConvertedQuantizer)
