"""Making `Experts` of what others hold: a state dict, or linear layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from moe_ext.nn._load import experts_of_linears, experts_of_state_dict
from moe_ext.nn._pieces import FP8
from moe_ext.nn._weights import PackedWeights

_Self = TypeVar("_Self", bound="FromCheckpoint")


class FromCheckpoint(PackedWeights):
    """The constructors of `Experts` that take weights."""

    @abstractmethod
    def _check(self) -> None:
        """Raise a ValueError unless the tensors and options are those of a layer."""

    @classmethod
    def from_state_dict(
        cls: type[_Self],
        state_dict: Mapping[str, Tensor],
        *,
        prefix: str = "",
        num_experts: int | None = None,
        first_expert: int = 0,
        num_local: int | None = None,
        intermediate_range: tuple[int, int] | None = None,
        pad_blocks: bool = False,
        transposed: bool | None = None,
        quantize: str | None = None,
        device: torch.device | str | None = None,
        consume: bool = False,
        **options: Any,
    ) -> _Self:
        """Make experts of a checkpoint's tensors.

        Args:
            state_dict: tensors in one of two forms, `E` experts. Others than those named here are
                ignored unless their name begins like an expert's. In bfloat16, float16 or float32,
                which become bfloat16 or what `quantize` says, or in float8_e4m3fn.
                Packed: `gate_up_proj` (E, 2 * intermediate, hidden) and `down_proj` (E, hidden,
                intermediate), or transposed, (E, hidden, 2 * intermediate) and (E, intermediate,
                hidden), as gpt-oss has them; `up_proj` for ungated activations. Beside them
                `*_bias` (E, rows); `*_scale_inv` or `*_scale`; `*_activation_scale` or
                `*_input_scale`.
                Per expert i: `{i}.gate_proj`, `{i}.up_proj`, `{i}.down_proj` or `{i}.w1`, `{i}.w3`,
                `{i}.w2`, each with `.weight` (rows, columns), and where there are `.bias` (rows,),
                `.weight_scale_inv` or `.weight_scale`, `.input_scale` or `.activation_scale`.
                Scales multiply, in any dtype of `scales_to_float32` but int32: () or (1,), (rows,)
                or (rows, 1), or blocks of 128 x 128.
            prefix: what precedes these names, as "model.layers.3.mlp.experts".
            num_experts: of the whole layer; None is as many as `state_dict` has.
            first_expert: of the whole layer, that is the first one here: expert parallelism. It
                becomes the argument of `fused_moe`.
            num_local: how many experts are here; None is all from `first_expert` on.
            intermediate_range: the intermediate features that are here, (begin, end): tensor
                parallelism, rank r of n having (r * intermediate // n, (r + 1) * intermediate //
                n), or shards of unequal size. The outputs of all ranks are to be added; the bias
                of the down GEMM is with the rank that begins at 0. None is all.
            pad_blocks: where scales are per block and the range begins inside a block, put features
                of zeros in front, up to the block's beginning: exact, for up to 127 features more.
                Without it such a range is refused.
            transposed: whether packed tensors are transposed; None looks at their shapes, and is
                False for ungated activations, where these do not tell.
            quantize: None, or how weights that are not FP8 become so, each expert by itself after
                all cuts: "block", "channel" or "tensor" as `scales` of this class.
            device: of the result; None is that of the weights.
            consume: remove each tensor of an expert here from `state_dict` once it is copied, so
                that its memory is free if no one else holds it. Nothing is removed where what it
                holds does not fit.
            **options: `activation` and what follows it in the arguments of this class, but
                `first_expert`.

        Returns:
            Experts that hold no tensor of `state_dict`, except for packed weights that can be used
            as they are (same dtype and device, uncut, not transposed, rows 16-byte aligned): these
            they share, and no copy is made.

        Raises:
            ValueError: a tensor is missing, unknown, or does not fit the others; a shard is not
                exact; or an argument differs from the above.

        Notes:
            Gate and up keep block grids of their own. Where gate and up have one scale each that
            differ, `w13_scale` is per channel, which is exact; with an input scale, which asks for
            one per expert, the smaller is brought to the larger, rounding once more. Input scales
            become the largest among the experts here.
        """
        # Raises for bad options before anything is read.
        cls(1, 8, 8, dtype=FP8, scales="tensor", device="meta", **options)
        tensors = experts_of_state_dict(
            "Experts.from_state_dict",
            state_dict,
            prefix=prefix,
            num_experts=num_experts,
            first_expert=first_expert,
            num_local=num_local,
            intermediate_range=intermediate_range,
            pad_blocks=pad_blocks,
            transposed=transposed,
            quantize=quantize,
            device=device,
            consume=consume,
            activation=options.get("activation", "swiglu"),
            gate_up_layout=options.get("gate_up_layout", "concatenated"),
        )
        return cls._of_tensors(tensors, first_expert=first_expert, **options)

    @classmethod
    def from_linears(
        cls: type[_Self],
        experts: Iterable[nn.Module],
        *,
        first_expert: int = 0,
        num_local: int | None = None,
        intermediate_range: tuple[int, int] | None = None,
        quantize: str | None = None,
        device: torch.device | str | None = None,
        consume: bool = False,
        **options: Any,
    ) -> _Self:
        """Make experts of modules that hold `nn.Linear`s, one module for each expert.

        Args:
            experts: modules, as an `nn.ModuleList` of them, with linears `gate_proj`, `up_proj` and
                `down_proj`, or `w1`, `w3` and `w2`; ungated ones without the gate. With or without
                biases.
            first_expert: see `from_state_dict`.
            num_local: see `from_state_dict`.
            intermediate_range: see `from_state_dict`.
            quantize: see `from_state_dict`.
            device: see `from_state_dict`.
            consume: take each weight and bias from its linear once it is copied, so that the
                linears are of no use afterwards.
            **options: see `from_state_dict`.

        Returns:
            Experts that share nothing with the linears.

        Raises:
            ValueError: a linear is missing or does not fit the others, or an argument differs from
                the above.
        """
        # Raises for bad options before anything is read.
        cls(1, 8, 8, dtype=FP8, scales="tensor", device="meta", **options)
        tensors = experts_of_linears(
            "Experts.from_linears",
            experts,
            first_expert=first_expert,
            num_local=num_local,
            intermediate_range=intermediate_range,
            quantize=quantize,
            device=device,
            consume=consume,
            activation=options.get("activation", "swiglu"),
            gate_up_layout=options.get("gate_up_layout", "concatenated"),
        )
        return cls._of_tensors(tensors, first_expert=first_expert, **options)

    @classmethod
    def _of_tensors(cls: type[_Self], tensors: dict[str, Tensor], **options: Any) -> _Self:
        weight = tensors["w2"]
        # Options are checked here and then with the tensors; any scales will do before.
        scales = "tensor" if weight.dtype is FP8 else None
        self = cls(*weight.shape, dtype=weight.dtype, device="meta", scales=scales, **options)
        self._set_tensors(tensors)
        self._check()
        return self
