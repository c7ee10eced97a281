"""`LayerPlan`: for each expert and stage of one layer, FP8 or BF16."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from moe_ext._fused_moe_workspace import MAX_EXPERTS
from moe_ext.nn._arguments import is_int, shown
from moe_ext.nn._pieces import LAYOUTS, quoted

STAGES = ("gate_up", "down")
"""The two GEMMs of an expert, with `w13` and `w2` of `fused_moe`."""
FP8, BF16 = "fp8", "bf16"
OP = "PrecisionPlan"


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
        check_layer(OP, "", self)

    def stage(self, name: str) -> StagePlan:
        """Return the plan of "gate_up" or "down"."""
        if name not in STAGES:
            raise ValueError(f"{OP}: a stage must be one of {listed(STAGES)}, got {shown(name)}")
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
        changed = {n: replace(plan.stage(n), scales=scales) for n in stage_names(stages)}
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
        for name in stage_names(stages):
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
                f"{OP}: `count` must be an int from 1 to {self.num_experts - first}, got "
                f"{shown(count)}"
            )
        stages = []
        for name in STAGES:
            stage = self.stage(name)
            kept = tuple(e - first for e in stage.bf16 if first <= e < first + count)
            stages.append(replace(stage, bf16=kept))
        return LayerPlan(count, *stages)


def check_num_experts(op: str, where: str, count: Any) -> None:
    """Raise a ValueError unless a layer can have so many experts; `where` precedes the name."""
    if not is_int(count) or not 1 <= count <= MAX_EXPERTS:
        raise ValueError(
            f"{op}: `{where}num_experts` must be an int from 1 to {MAX_EXPERTS}, got {shown(count)}"
        )


def check_layer(op: str, where: str, layer: LayerPlan) -> None:
    """Raise a ValueError unless a plan of a layer is one; `where` precedes its attributes."""
    count = layer.num_experts
    check_num_experts(op, where, count)
    for name in STAGES:
        stage, path = getattr(layer, name), f"{where}{name}"
        if not isinstance(stage, StagePlan):
            raise ValueError(f"{op}: `{path}` must be a StagePlan, got {shown(stage)}")
        if not isinstance(stage.scales, str) or stage.scales not in LAYOUTS:
            raise ValueError(
                f"{op}: `{path}.scales` must be one of {listed(LAYOUTS)}, got {shown(stage.scales)}"
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
            f"{OP}: an expert must be an int from 0 to {num_experts - 1}, got {shown(expert)}"
        )


def _expert_set(experts: int | Iterable[int] | None, num_experts: int) -> frozenset[int]:
    if experts is None:
        return frozenset(range(num_experts))
    chosen = (experts,) if isinstance(experts, int) else tuple(experts)
    for expert in chosen:
        _check_expert(expert, num_experts)
    return frozenset(chosen)


def stage_names(stages: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the stages that an argument names; None is both."""
    if stages is None:
        return STAGES
    names = (stages,) if isinstance(stages, str) else tuple(stages)
    for name in names:
        if name not in STAGES:
            raise ValueError(f"{OP}: a stage must be one of {listed(STAGES)}, got {shown(name)}")
    return names


def listed(names: Iterable[str]) -> str:
    """Return names as messages list them."""
    return ", ".join(map(quoted, names))
