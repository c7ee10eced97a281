"""`PrecisionPlan`: for each expert and stage of a model's layers, FP8 or BF16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moe_ext.nn._arguments import is_int, shown
from moe_ext.nn._pieces import quoted
from moe_ext.precision.layer_plan import (
    BF16,
    FP8,
    OP,
    STAGES,
    LayerPlan,
    Precision,
    StagePlan,
    listed,
    stage_names,
)


class PrecisionPlan:
    """The precision of every (layer, expert, stage) of a model; immutable, in order of layers.

    Args:
        layers: plans by the layer's name, as the prefix of its experts in a state dict:
            "model.layers.3.mlp.experts". The order is that of the model.

    Raises:
        ValueError: a name is not a string or empty, or a plan is none.

    Notes:
        JSON: `to_json`, `from_json`, `save`, `load`. The form is versioned, see docs/precision.md.

    Example:
        >>> plan = PrecisionPlan.uniform({"a": 8, "b": 8, "c": 8})
        >>> plan = plan.with_bf16(layers=(0, -1))  # first and last layer
        >>> plan = plan.with_bf16(stages="down")  # the down stage of all
        >>> plan["b", 3, "down"].kind, plan["b", 3, "gate_up"].kind, plan["c", 0, "gate_up"].kind
        ('bf16', 'fp8', 'bf16')
    """

    __slots__ = ("_layers",)
    _layers: Mapping[str, LayerPlan]

    def __init__(self, layers: Mapping[str, LayerPlan]) -> None:
        """Take plans of layers."""
        if not isinstance(layers, Mapping):
            raise ValueError(
                f"{OP}: `layers` must map names to plans of layers, got {shown(layers)}"
            )
        for name, layer in layers.items():
            if not isinstance(name, str) or not name:
                raise ValueError(
                    f"{OP}: the name of a layer must be a string, not empty, got {shown(name)}"
                )
            if not isinstance(layer, LayerPlan):
                raise ValueError(
                    f"{OP}: `layers[{quoted(name)}]` must be a LayerPlan, got {shown(layer)}"
                )
        object.__setattr__(self, "_layers", MappingProxyType(dict(layers)))

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse."""
        raise AttributeError(f"{OP}: plans do not change; `with_bf16` and `with_fp8` make others")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the layers."""
        return PrecisionPlan, (dict(self._layers),)

    @classmethod
    def uniform(
        cls, layers: Mapping[str, int], kind: str = FP8, *, scales: str = "block"
    ) -> PrecisionPlan:
        """Return a plan with all experts in "fp8" or "bf16".

        Args:
            layers: how many experts each layer has, by name.
            kind: "fp8" or "bf16".
            scales: of both stages.
        """
        if kind not in (FP8, BF16):
            raise ValueError(f'{OP}: `kind` must be "fp8" or "bf16", got {shown(kind)}')
        stage = StagePlan(scales)
        plan = cls({name: LayerPlan(count, stage, stage) for name, count in layers.items()})
        return plan if kind == FP8 else plan.with_bf16()

    @property
    def layers(self) -> Mapping[str, LayerPlan]:
        """The plans of layers by name, read-only."""
        return self._layers

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers, in order."""
        return tuple(self._layers)

    def layer(self, name: str | int) -> LayerPlan:
        """Return the plan of a layer, by name or position."""
        return self._layers[self._name(name)]

    def __getitem__(self, place: tuple[str | int, int, str]) -> Precision:
        """Return the precision of (layer, expert, stage); the layer by name or position."""
        layer, expert, stage = place
        return self.layer(layer)[expert, stage]

    def bf16(self) -> Iterator[tuple[str, int, str]]:
        """List every (layer, expert, stage) in BF16, in order."""
        for name, layer in self._layers.items():
            for stage in STAGES:
                yield from ((name, expert, stage) for expert in layer.stage(stage).bf16)

    def with_bf16(
        self,
        *,
        layers: str | int | Iterable[str | int] | None = None,
        experts: int | Iterable[int] | None = None,
        stages: str | Iterable[str] | None = None,
    ) -> PrecisionPlan:
        """Return a plan with more in BF16.

        Args:
            layers: by name or position, -1 being the last; None is all, as below.
            experts: of each of these layers.
            stages: "gate_up", "down", or both.
        """
        chosen = self._chosen(layers)
        experts = experts if experts is None or isinstance(experts, int) else tuple(experts)
        stages = stage_names(stages)
        return PrecisionPlan(
            {
                name: layer.with_bf16(experts=experts, stages=stages) if name in chosen else layer
                for name, layer in self._layers.items()
            }
        )

    def with_fp8(
        self,
        *,
        layers: str | int | Iterable[str | int] | None = None,
        experts: int | Iterable[int] | None = None,
        stages: str | Iterable[str] | None = None,
        scales: str | None = None,
    ) -> PrecisionPlan:
        """Return a plan with more in FP8.

        Args:
            layers: see `with_bf16`, like the two below.
            experts: see `with_bf16`.
            stages: see `with_bf16`.
            scales: "block", "channel" or "tensor", for all of these stages' experts; None is what
                there was.
        """
        chosen = self._chosen(layers)
        experts = experts if experts is None or isinstance(experts, int) else tuple(experts)
        stages = stage_names(stages)
        return PrecisionPlan(
            {
                name: layer.with_fp8(experts=experts, stages=stages, scales=scales)
                if name in chosen
                else layer
                for name, layer in self._layers.items()
            }
        )

    def _name(self, layer: str | int) -> str:
        names = self.names
        if isinstance(layer, str) and layer in self._layers:
            return layer
        if is_int(layer) and -len(names) <= int(layer) < len(names):
            return names[int(layer)]
        raise ValueError(
            f"{OP}: a layer must be a name or position among {len(names)} layers "
            f"({listed(names[:3])}{', ...' if len(names) > 3 else ''}), got {shown(layer)}"
        )

    def _chosen(self, layers: str | int | Iterable[str | int] | None) -> frozenset[str]:
        if layers is None:
            return frozenset(self._layers)
        if isinstance(layers, (str, int)):
            layers = (layers,)
        return frozenset(self._name(layer) for layer in layers)

    def __eq__(self, other: object) -> bool:
        """Whether layers, their order and all their precisions are the same."""
        if not isinstance(other, PrecisionPlan):
            return NotImplemented
        return tuple(self._layers.items()) == tuple(other._layers.items())

    def __hash__(self) -> int:
        """Hash as compared."""
        return hash(tuple(self._layers.items()))

    def __repr__(self) -> str:
        """Say how much is in BF16."""
        total = sum(2 * layer.num_experts for layer in self._layers.values())
        count = sum(1 for _ in self.bf16())
        return f"{OP}({len(self._layers)} layers, {count} of {total} expert stages in BF16)"

    def to_json(self) -> str:
        """Return the plan as JSON, a layer to a line."""
        from moe_ext.precision._plan_json import write_plan

        return write_plan(self)

    @classmethod
    def from_json(cls, text: str) -> PrecisionPlan:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is no plan, of a later version, or something in it is wrong; the
                message says where.
        """
        from moe_ext.precision._plan_json import read_plan

        return read_plan(text)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, which appears when it is complete."""
        from moe_ext.precision._files import written

        with written(path) as temporary:
            temporary.write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> PrecisionPlan:
        """Read a plan from a file.

        Raises:
            ValueError: see `from_json`; the message ends with the path.
        """
        try:
            text = Path(path).read_text()
        except UnicodeDecodeError:
            raise ValueError(f"{OP}: `path` must be a file of text, got bytes: {path}") from None
        try:
            return cls.from_json(text)
        except ValueError as error:
            raise ValueError(f"{error}, in {path}") from None
