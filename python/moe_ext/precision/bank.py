"""The module `ExpertBank`: a layer's experts in the precision that a plan says, in FP8 and BF16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_ext._activations import ACTIVATIONS, INTERLEAVED
from moe_ext._fused_moe_workspace import mixed_workspace_bytes
from moe_ext.nn._arguments import check_bool, shown
from moe_ext.nn._call import check_call, rows_of, rows_of_out
from moe_ext.nn._options import LayerOptions, check_sizes
from moe_ext.nn._store import empty_rows, scale_shape
from moe_ext.nn._weights import PackedWeights
from moe_ext.nn.experts import Experts
from moe_ext.precision._slots import KINDS, WEIGHT, parts_of, place_map, slot_map, slots_of
from moe_ext.precision.layer_plan import BF16, FP8, STAGES, LayerPlan
from moe_ext.precision.mixed import fused_moe_mixed

_DTYPES = {FP8: torch.float8_e4m3fn, BF16: torch.bfloat16}
_PLACES = tuple(f"{WEIGHT[stage]}_{kind}" for stage in STAGES for kind in KINDS)


class ExpertBank(LayerOptions, PackedWeights):
    """A layer's experts, each stage of each in FP8 or BF16: packed weights under a `LayerPlan`.

    Made empty, for `load_state_dict`; or full, by `from_experts`, `shard` or `load`. Called as
    `moe_ext.nn.Experts`, and takes its place in a `MoELayer`.

    Args:
        plan: of the experts here.
        hidden_size: a multiple of 8.
        intermediate_size: that is here, a multiple of 8.
        device: of all tensors; None is torch's default, "meta" has no memory.
        static_scales: whether there are scales of activations, where both stages have scales per
            "tensor" alone.
        bias: whether both GEMMs have one, in bfloat16.
        **options: `activation` and what follows it in the arguments of `Experts`.

    Attributes:
        plan: the plan.
        w13_fp8: parameter (slots, n, hidden_size), float8_e4m3fn, rows 16-byte aligned; None where
            there is no slot, as all below.
        w13_bf16: parameter (slots, n, hidden_size), bfloat16.
        w2_fp8: parameter (slots, hidden_size, intermediate_size), float8_e4m3fn, rows aligned.
        w2_bf16: parameter (slots, hidden_size, intermediate_size), bfloat16.
        w13_fp8_scale: buffer, float32, as `Experts.w13_scale` of so many experts; `w2_fp8_scale`.
        w13_fp8_bias: parameter (slots, n); likewise `w13_bf16_bias`, `w2_fp8_bias`, `w2_bf16_bias`
            (slots, hidden_size).
        a1_scale: buffer, float32, (), or None; `a2_scale`.
        w13_slots: buffer (num_experts,) int32: an expert's slot of FP8, or -1 - its slot of BF16;
            `w2_slots`.
        places: buffer (num_experts,) int32: where an expert is in the order of pairs of
            precisions: both FP8, then down in BF16, both BF16, then down in FP8.

    Raises:
        ValueError: an argument differs from the above.

    Notes:
        Slots are in the order of places, so that the experts of each pair of precisions are one
        range of slots in each stage. Inference only; moves keep dtypes, as those of `Experts` do.

    Example:
        >>> plan = LayerPlan(8).with_bf16(experts=5).with_bf16(experts=2, stages="down")
        >>> bank = ExpertBank(plan, 64, 32)
        >>> bank.w13_slots.tolist(), bank.w2_slots.tolist()
        ([0, 1, 6, 2, 3, -1, 4, 5], [0, 1, -1, 2, 3, -2, 4, 5])
    """

    _weights: ClassVar[tuple[str, ...]] = _PLACES
    _biases: ClassVar[tuple[str, ...]] = tuple(f"{name}_bias" for name in _PLACES)
    _scales: ClassVar[tuple[str, ...]] = ("w13_fp8_scale", "w2_fp8_scale", "a1_scale", "a2_scale")

    w13_slots: Tensor
    w2_slots: Tensor
    places: Tensor
    a1_scale: Tensor | None
    a2_scale: Tensor | None

    def __init__(
        self,
        plan: LayerPlan,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device | str | None = None,
        static_scales: bool = False,
        bias: bool = False,
        **options: Any,
    ) -> None:
        """Allocate the tensors, without values but for the maps."""
        super().__init__()
        if not isinstance(plan, LayerPlan):
            raise ValueError(f"ExpertBank: `plan` must be a LayerPlan, got {shown(plan)}")
        check_sizes("ExpertBank", plan.num_experts, hidden_size, intermediate_size)
        check_bool("ExpertBank", "static_scales", static_scales)
        check_bool("ExpertBank", "bias", bias)
        layouts = [plan.stage(stage).scales for stage in STAGES]
        if static_scales and set(layouts) != {"tensor"}:
            raise ValueError(
                "ExpertBank: `static_scales` must be False unless both stages have scales per "
                f'"tensor", got True with {layouts[0]!r} and {layouts[1]!r}'
            )
        for name, value in _complete(plan, options).items():
            setattr(self, name, value)
        self.plan = plan
        first = parts_of(plan)[0]
        self._num_fp8 = first.num_experts if first.kinds == (FP8, FP8) else 0
        self._is_uniform = plan.is_uniform
        self._sizes = (hidden_size, intermediate_size)
        tensors: dict[str, Tensor] = {}
        for (stage, kind), experts in slots_of(plan).items():
            tensors |= self._empty(stage, kind, len(experts), bias, device)
        if static_scales:
            for name in ("a1_scale", "a2_scale"):
                tensors[name] = torch.empty((), dtype=torch.float32, device=device)
        self._set_tensors(tensors)
        self._set_maps(torch.empty(0, device=device).device)

    def _set_maps(self, device: torch.device) -> None:
        """Make the maps, which follow from the plan and are saved in no state dict."""
        for stage in STAGES:
            table = slot_map(self.plan, stage).to(device)
            self.register_buffer(f"{WEIGHT[stage]}_slots", table, persistent=False)
        self.register_buffer("places", place_map(self.plan).to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertBank:
        """Move tensors; maps are made anew, as they may come from a device without memory."""
        super()._apply(fn, recurse)
        self._set_maps(fn(self.w13_slots.new_empty(0)).device)
        return self

    def _empty(
        self, stage: str, kind: str, count: int, bias: bool, device: torch.device | str | None
    ) -> dict[str, Tensor]:
        """Return the tensors of the slots of one stage in one precision, without values."""
        if count == 0:
            return {}
        n, k = self.matrix_shape(stage)
        name = f"{WEIGHT[stage]}_{kind}"
        tensors = {name: empty_rows((count, n, k), _DTYPES[kind], device)}
        if bias:
            tensors[f"{name}_bias"] = torch.empty(count, n, dtype=torch.bfloat16, device=device)
        if kind == FP8:
            shape = scale_shape(self.plan.stage(stage).scales, count, n, k, self.has_halves(stage))
            tensors[f"{name}_scale"] = torch.empty(shape, dtype=torch.float32, device=device)
        return tensors

    def matrix_shape(self, stage: str) -> tuple[int, int]:
        """Return (n, k) of an expert's matrix of a stage."""
        hidden, intermediate = self._sizes
        if stage == "down":
            return hidden, intermediate
        return intermediate * (2 if ACTIVATIONS[self.activation].gated else 1), hidden

    def has_halves(self, stage: str) -> bool:
        """Whether a stage's matrix has gate rows, then up rows."""
        gated = ACTIVATIONS[self.activation].gated
        return stage == "gate_up" and gated and self.gate_up_layout != INTERLEAVED

    @classmethod
    def from_experts(
        cls,
        plan: LayerPlan,
        *,
        bf16: Experts | None = None,
        fp8: Experts | None = None,
        device: torch.device | str | None = None,
    ) -> ExpertBank:
        """Make a bank of experts in BF16, in FP8, or of both.

        Args:
            plan: of the experts.
            bf16: in bfloat16. All experts, from which those of FP8 are quantised where `fp8` is
                None; or, beside `fp8`, only those that have a stage in BF16, in ascending order.
                None where the plan has nothing in BF16.
            fp8: in float8_e4m3fn, all experts, with scales as the plan says, as of a checkpoint:
                what the plan has in FP8 is taken as it is. None where there is none.
            device: of the bank; None is that of the experts.

        Returns:
            A bank that shares no memory with the experts, and has their options.

        Raises:
            ValueError: an argument differs from the above, or `bf16` and `fp8` do not fit.
        """
        from moe_ext.precision._bank_build import bank_of_experts

        return bank_of_experts(cls, plan, bf16, fp8, device)

    def shard(
        self,
        *,
        first_expert: int | None = None,
        num_local: int | None = None,
        intermediate_range: tuple[int, int] | None = None,
    ) -> ExpertBank:
        """Return the bank of one of several ranks, a copy.

        Args:
            first_expert: expert parallelism: the id of its first expert, among those here. None is
                the first one here.
            num_local: how many experts; None is all from there on.
            intermediate_range: tensor parallelism: the intermediate features (begin, end), counted
                from those here. Where FP8 weights have scales per block, it begins at a multiple of
                128 (64 for interleaved gate and up). The bias of the down GEMM is with the rank
                that begins at 0. None is all.

        Raises:
            ValueError: an argument differs from the above.
        """
        from moe_ext.precision._bank_shard import shard_of_bank

        return shard_of_bank(self, first_expert, num_local, intermediate_range)

    def save(self, path: str | Path) -> None:
        """Write bank, plan and options to a safetensors file, which appears when it is complete."""
        from moe_ext.precision._bank_files import save_bank

        save_bank(self, path)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str | None = None) -> ExpertBank:
        """Read what `save` wrote, to a device; None is the CPU.

        Raises:
            ValueError: the file holds no bank, one of a later version, or tensors that do not fit
                its plan.
        """
        from moe_ext.precision._bank_files import load_bank

        return load_bank(cls, path, device)

    @classmethod
    def from_checkpoint(
        cls,
        directory: str | Path,
        layer: str,
        *,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> ExpertBank:
        """Read one layer of a checkpoint that `convert_checkpoint` (`moe-ext convert`) wrote.

        Args:
            directory: of the checkpoint.
            layer: its name in the plan, as "model.layers.3.mlp.experts".
            device: of the bank; None is the CPU.
            **options: see `ExpertBank`; gate and up are concatenated.

        Raises:
            ValueError: there is no such checkpoint or layer, or it differs from its plan.
            OSError: a file cannot be read.
        """
        from moe_ext.precision._bank_checkpoint import bank_of_checkpoint

        return bank_of_checkpoint(cls, directory, layer, device, options)

    @property
    def num_experts(self) -> int:
        """How many experts are here."""
        return self.plan.num_experts

    @property
    def hidden_size(self) -> int:
        """Columns of hidden states."""
        return self._sizes[0]

    @property
    def intermediate_size(self) -> int:
        """How many intermediate features are here."""
        return self._sizes[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, their scales and biases, with the padding of rows."""
        names = (*self._weights, *self._biases, *self._scales)
        tensors = [tensor for name in names if (tensor := getattr(self, name)) is not None]
        return sum(t.stride(0) * t.shape[0] * t.itemsize if t.dim() else 4 for t in tensors)

    def workspace_size(self, num_tokens: int, top_k: int) -> int:
        """Return how many bytes of `workspace` so many tokens need, or fewer tokens.

        Of a bank in one precision those of `moe_ext.fused_moe_workspace_size`; of any other at most
        num_tokens * top_k * ((intermediate_size + hidden_size) * 2 + 16) + num_tokens *
        (hidden_size + 4 * ceil(hidden_size / 128)) + min(num_tokens * top_k, 512) *
        (intermediate_size + 4 * ceil(intermediate_size / 128)) + 64 KiB.
        """
        of_one_precision = super().workspace_size(num_tokens, top_k)
        if self._is_uniform:
            return of_one_precision
        return mixed_workspace_bytes(num_tokens, top_k, *self._sizes, self.num_experts)

    def forward(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        addend: Tensor | None = None,
        expert_map: Tensor | None = None,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> Tensor:
        """Run the experts: see `fused_moe_mixed`, and `Experts.forward` for the arguments.

        Args:
            hidden_states: see `Experts.forward`, like all arguments.
            topk_weights: see there.
            topk_ids: see there.
            addend: see there.
            expert_map: see there.
            out: see there.
            workspace: see there.

        Returns:
            (..., hidden_size), bfloat16; `out` itself where it is given.
        """
        check_call(
            "ExpertBank",
            self.hidden_size,
            hidden_states,
            topk_weights,
            topk_ids,
            addend,
            expert_map,
            out,
            workspace,
        )
        result = fused_moe_mixed(
            rows_of(hidden_states),
            self,
            rows_of(topk_weights),
            rows_of(topk_ids),
            addend=None if addend is None else rows_of(addend),
            expert_map=expert_map,
            out=None if out is None else rows_of_out("ExpertBank", out),
            workspace=workspace,
        )
        return result.reshape(hidden_states.shape) if out is None else out

    def extra_repr(self) -> str:
        """Say sizes and what is in BF16."""
        counts = {stage: len(self.plan.stage(stage).bf16) for stage in STAGES}
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, activation={self.activation!r}, "
            f"bf16 gate_up={counts['gate_up']}, bf16 down={counts['down']}"
        )


def _complete(plan: LayerPlan, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options, or raise a ValueError for the first that `Experts` does not take."""
    for name in options:
        if name not in LayerOptions.__annotations__:
            raise ValueError(
                f"ExpertBank: an option must be one of {', '.join(LayerOptions.__annotations__)}, "
                f"got {shown(name)}"
            )
    layouts = {plan.stage(stage).scales for stage in STAGES}
    checked = [
        Experts(1, 8, 8, dtype=_DTYPES[FP8], scales=layout, device="meta", **options)
        for layout in sorted(layouts)
    ]
    return checked[0]._choices()
