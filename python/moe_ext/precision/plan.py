"""`PrecisionPlan`: for each expert and stage of a model's layers, FP8 or BF16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from moe_ext._fused_moe_workspace import MAX_EXPERTS
from moe_ext.nn._arguments import is_int, shown
from moe_ext.nn._pieces import LAYOUTS, quoted

STAGES = ("gate_up", "down")
"""The two GEMMs of an expert, with `w13` and `w2` of `fused_moe`."""
FP8, BF16 = "fp8", "bf16"
_OP = "PrecisionPlan"


class Precision(NamedTuple):
    """What one stage of one expert is kept and computed in."""

    kind: str  # "fp8" or "bf16"
    scales: str | None = None  # of FP8 weights: "block", "channel" or "tensor"


@dataclass(frozen=True)
class StagePlan:
    """Which experts have one stage in BF16; all others have it in FP8.

    Attributes:
        scales: how the FP8 weights share scales: "block" (128 x 128), "channel" (a row) or "tensor"
            (an expert). It also says how activations are quantised, see `moe_ext.fused_moe`.
        bf16: experts in BF16, ascending.
    """

    scales: str = "block"
    bf16: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerPlan:
    """The precision of every expert and stage of one layer; immutable.

    Attributes:
        num_experts: of the layer, 1 to 4,096.
        gate_up: the first GEMM, from hidden states to gate and up.
        down: the second GEMM, from the intermediate to the output.

    Raises:
        ValueError: an attribute differs from the above.

    Example:
        >>> layer = LayerPlan(128).with_bf16(experts=(3, 17), stages="down")
        >>> layer[3, "down"].kind, layer[3, "gate_up"]
        ('bf16', Precision(kind='fp8', scales='block'))
    """

    num_experts: int
    gate_up: StagePlan = StagePlan()
    down: StagePlan = StagePlan()

    def __post_init__(self) -> None:
        """Check what came."""
        check_layer(_OP, "", self)

    def stage(self, name: str) -> StagePlan:
        """Return the plan of "gate_up" or "down"."""
        if name not in STAGES:
            raise ValueError(f"{_OP}: a stage must be one of {_listed(STAGES)}, got {shown(name)}")
        found: StagePlan = getattr(self, name)
        return found

    def __getitem__(self, place: tuple[int, str]) -> Precision:
        """Return the precision of (expert, stage)."""
        expert, name = place
        stage = self.stage(name)
        _check_expert(expert, self.num_experts)
        return Precision(BF16) if expert in stage.bf16 else Precision(FP8, stage.scales)

    def kinds(self, stage: str) -> tuple[str, ...]:
        """Return "fp8" or "bf16" for each expert."""
        chosen = frozenset(self.stage(stage).bf16)
        return tuple(BF16 if expert in chosen else FP8 for expert in range(self.num_experts))

    @property
    def is_uniform(self) -> bool:
        """Whether all experts have the same precision in both stages."""
        return len({*self.kinds("gate_up"), *self.kinds("down")}) == 1

    def with_bf16(
        self,
        *,
        experts: int | Iterable[int] | None = None,
        stages: str | Iterable[str] | None = None,
    ) -> LayerPlan:
        """Return a plan with more in BF16; None is all."""
        return self._with(experts, stages, in_bf16=True)

    def with_fp8(
        self,
        *,
        experts: int | Iterable[int] | None = None,
        stages: str | Iterable[str] | None = None,
        scales: str | None = None,
    ) -> LayerPlan:
        """Return a plan with more in FP8; None is all, and for `scales` what there was.

        `scales` is of the stage, so also of its experts that are not named.
        """
        plan = self._with(experts, stages, in_bf16=False)
        if scales is None:
            return plan
        changed = {n: replace(plan.stage(n), scales=scales) for n in _stage_names(stages)}
        return plan._replaced(changed)

    def _replaced(self, stages: dict[str, StagePlan]) -> LayerPlan:
        return LayerPlan(
            self.num_experts, stages.get("gate_up", self.gate_up), stages.get("down", self.down)
        )

    def _with(
        self, experts: int | Iterable[int] | None, stages: str | Iterable[str] | None, in_bf16: bool
    ) -> LayerPlan:
        chosen = _expert_set(experts, self.num_experts)
        changed = {}
        for name in _stage_names(stages):
            stage = self.stage(name)
            before = frozenset(stage.bf16)
            after = before | chosen if in_bf16 else before - chosen
            changed[name] = replace(stage, bf16=tuple(sorted(after)))
        return self._replaced(changed)

    def of_experts(self, first: int, count: int) -> LayerPlan:
        """Return the plan of `count` experts from `first` on, counted from there."""
        _check_expert(first, self.num_experts)
        if not is_int(count) or not 1 <= count <= self.num_experts - first:
            raise ValueError(
                f"{_OP}: `count` must be an int from 1 to {self.num_experts - first}, got "
                f"{shown(count)}"
            )
        stages = []
        for name in STAGES:
            stage = self.stage(name)
            kept = tuple(e - first for e in stage.bf16 if first <= e < first + count)
            stages.append(replace(stage, bf16=kept))
        return LayerPlan(count, *stages)


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
                f"{_OP}: `layers` must map names to plans of layers, got {shown(layers)}"
            )
        for name, layer in layers.items():
            if not isinstance(name, str) or not name:
                raise ValueError(
                    f"{_OP}: the name of a layer must be a string, not empty, got {shown(name)}"
                )
            if not isinstance(layer, LayerPlan):
                raise ValueError(
                    f"{_OP}: `layers[{quoted(name)}]` must be a LayerPlan, got {shown(layer)}"
                )
        object.__setattr__(self, "_layers", MappingProxyType(dict(layers)))

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse."""
        raise AttributeError(f"{_OP}: plans do not change; `with_bf16` and `with_fp8` make others")

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
            raise ValueError(f'{_OP}: `kind` must be "fp8" or "bf16", got {shown(kind)}')
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
        stages = _stage_names(stages)
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
        stages = _stage_names(stages)
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
            f"{_OP}: a layer must be a name or position among {len(names)} layers "
            f"({_listed(names[:3])}{', ...' if len(names) > 3 else ''}), got {shown(layer)}"
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
        return f"{_OP}({len(self._layers)} layers, {count} of {total} expert stages in BF16)"

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
        """Read a plan from a file."""
        return cls.from_json(Path(path).read_text())


def check_layer(op: str, where: str, layer: LayerPlan) -> None:
    """Raise a ValueError unless a plan of a layer is one; `where` precedes its attributes."""
    count = layer.num_experts
    if not is_int(count) or not 1 <= count <= MAX_EXPERTS:
        raise ValueError(
            f"{op}: `{where}num_experts` must be an int from 1 to {MAX_EXPERTS}, got {shown(count)}"
        )
    for name in STAGES:
        stage, path = getattr(layer, name), f"{where}{name}"
        if not isinstance(stage, StagePlan):
            raise ValueError(f"{op}: `{path}` must be a StagePlan, got {shown(stage)}")
        if not isinstance(stage.scales, str) or stage.scales not in LAYOUTS:
            raise ValueError(
                f"{op}: `{path}.scales` must be one of {_listed(LAYOUTS)}, got "
                f"{shown(stage.scales)}"
            )
        if not isinstance(stage.bf16, tuple):
            raise ValueError(f"{op}: `{path}.bf16` must be a tuple, got {shown(stage.bf16)}")
        last = -1
        for expert in stage.bf16:
            if not is_int(expert) or not 0 <= expert < count:
                raise ValueError(
                    f"{op}: `{path}.bf16` must hold experts 0 to {count - 1}, got {shown(expert)}"
                )
            if expert <= last:
                raise ValueError(
                    f"{op}: `{path}.bf16` must be ascending, without repeats, got {expert} after "
                    f"{last}"
                )
            last = expert


def _check_expert(expert: Any, num_experts: int) -> None:
    if not is_int(expert) or not 0 <= expert < num_experts:
        raise ValueError(
            f"{_OP}: an expert must be an int from 0 to {num_experts - 1}, got {shown(expert)}"
        )


def _expert_set(experts: int | Iterable[int] | None, num_experts: int) -> frozenset[int]:
    if experts is None:
        return frozenset(range(num_experts))
    chosen = (experts,) if isinstance(experts, int) else tuple(experts)
    for expert in chosen:
        _check_expert(expert, num_experts)
    return frozenset(chosen)


def _stage_names(stages: str | Iterable[str] | None) -> tuple[str, ...]:
    if stages is None:
        return STAGES
    names = (stages,) if isinstance(stages, str) else tuple(stages)
    for name in names:
        if name not in STAGES:
            raise ValueError(f"{_OP}: a stage must be one of {_listed(STAGES)}, got {shown(name)}")
    return names


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(quoted, names))
