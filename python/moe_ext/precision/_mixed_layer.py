"""What `fused_moe_mixed` takes of a bank, as its op has it: weights by precision, and options."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from moe_ext._activations import CONCATENATED
from moe_ext.precision._slots import Part, parts_of_counts
from moe_ext.precision.layer_plan import BF16

if TYPE_CHECKING:
    from moe_ext.precision.bank import ExpertBank


class MixedLayer(NamedTuple):
    """Weights of a stage in one precision are in the order of their experts' places."""

    places: Tensor  # (num_experts,) int32, of each expert in the order of parts
    w13_fp8: Tensor | None
    w13_bf16: Tensor | None
    w2_fp8: Tensor | None
    w2_bf16: Tensor | None
    w13_fp8_scale: Tensor | None
    w2_fp8_scale: Tensor | None
    a1_scale: Tensor | None
    a2_scale: Tensor | None
    w13_fp8_bias: Tensor | None
    w13_bf16_bias: Tensor | None
    w2_fp8_bias: Tensor | None
    w2_bf16_bias: Tensor | None
    num_fp8: int  # experts with both stages in FP8
    activation: str = "swiglu"
    alpha: float | None = None
    limit: float | None = None
    gate_up_layout: str = CONCATENATED
    apply_router_weight_on_input: bool = False
    first_expert: int = 0
    routed_scale: float = 1.0
    accumulate: str = "promoted"
    batch_invariant: bool = False

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """How many experts each pair of precisions has."""
        first, second = _count(self.w13_fp8), _count(self.w2_fp8)
        both_bf16 = _count(self.w2_bf16) - (first - self.num_fp8)
        return self.num_fp8, first - self.num_fp8, both_bf16, second - self.num_fp8

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Hidden and intermediate size and the number of experts."""
        w2 = self.w2_fp8 if self.w2_fp8 is not None else self.w2_bf16
        assert w2 is not None
        return w2.shape[1], w2.shape[2], self.places.shape[0]


OPERANDS = MixedLayer._fields[: MixedLayer._fields.index("activation")]
DEFAULTS = MixedLayer._field_defaults
"""Of the options."""


def _count(weight: Tensor | None) -> int:
    return 0 if weight is None else weight.shape[0]


def layer_of(bank: ExpertBank) -> MixedLayer:
    """Return what a bank holds; views."""
    # Not by the attributes of a module, which take half a microsecond each.
    tensors = {**bank._buffers, **bank._parameters}
    operands: list[Any] = [*(tensors[name] for name in OPERANDS[:-1]), bank._num_fp8]
    return MixedLayer(*operands, **bank._choices())


def parts_of_layer(layer: MixedLayer) -> tuple[Part, ...]:
    """Return the parts that have experts."""
    return _parts_of_counts(layer.counts)


_parts_of_counts = functools.lru_cache(maxsize=256)(parts_of_counts)


def tensors_of(layer: MixedLayer, part: Part) -> dict[str, Tensor | None]:
    """Return weights, scales and biases of a part by their names in `fused_moe`; views."""
    tensors: dict[str, Tensor | None] = {}
    for index, weight in enumerate(("w13", "w2")):
        kind, begin = part.kinds[index], part.begins[index]
        slots = slice(begin, begin + part.num_experts)
        for name, source in (
            (weight, f"{weight}_{kind}"),
            (f"{weight}_bias", f"{weight}_{kind}_bias"),
            (f"{weight}_scale", f"{weight}_{kind}_scale"),
            (f"a{weight[1]}_scale", f"a{weight[1]}_scale"),
        ):
            none = name.endswith("_scale") and kind == BF16
            tensor: Tensor | None = None if none else getattr(layer, source)
            tensors[name] = tensor if tensor is None or tensor.dim() == 0 else tensor[slots]
    return tensors


def options_of(layer: MixedLayer, part: Part) -> dict[str, Any]:
    """Return what `fused_moe` takes for a part of one precision."""
    options = {name: getattr(layer, name) for name in DEFAULTS} | tensors_of(layer, part)
    if part.kinds[0] == BF16:
        options["accumulate"] = "promoted"
    return options


def places_of_ids(layer: MixedLayer, expert_map: Tensor | None) -> Tensor:
    """Return (ids,) int32: the place of an id's expert, -1 for none."""
    places = layer.places
    if expert_map is None:
        return torch.cat([places.new_full((layer.first_expert,), -1), places])
    here = (expert_map >= 0) & (expert_map < places.shape[0])
    return places[expert_map.where(here, 0).long()].where(here, -1)


def map_of_part(places: Tensor, part: Part) -> Tensor:
    """Return (ids,) int32: where an id is in a part, -1 for elsewhere."""
    here = (places >= part.place) & (places < part.place + part.num_experts)
    return (places - part.place).where(here, -1).contiguous()
