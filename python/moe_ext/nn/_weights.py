"""The tensors of a layer's experts: how they are kept, moved and loaded."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moe_ext._fused_moe_workspace import fused_moe_workspace_size
from moe_ext._words import name_of
from moe_ext.scales import pad_rows, scales_to_float32

WEIGHTS = ("w13", "w2")
BIASES = ("w13_bias", "w2_bias")
SCALES = ("w13_scale", "w2_scale", "a1_scale", "a2_scale")
_SCALE_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.float8_e8m0fnu,
)  # of `scales_to_float32`


class PackedWeights(nn.Module, abc.ABC):
    """Weights and biases as parameters, scales as buffers; None for those that there are not.

    Whatever moves or replaces a weight leaves its rows 16-byte aligned, and its dtype as it was.
    """

    _weights: ClassVar[tuple[str, ...]] = WEIGHTS
    _biases: ClassVar[tuple[str, ...]] = BIASES
    _scales: ClassVar[tuple[str, ...]] = SCALES
    first_expert: int

    @property
    @abc.abstractmethod
    def num_experts(self) -> int:
        """How many experts are here."""

    @property
    @abc.abstractmethod
    def hidden_size(self) -> int:
        """Columns of hidden states."""

    @property
    @abc.abstractmethod
    def intermediate_size(self) -> int:
        """How many intermediate features are here."""

    def workspace_size(self, num_tokens: int, top_k: int) -> int:
        """Return how many bytes of `workspace` so many tokens need, or fewer tokens."""
        return fused_moe_workspace_size(
            num_tokens=num_tokens,
            top_k=top_k,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
        )

    def _set_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take tensors in place of those that there were."""
        for name in (*self._weights, *self._biases):
            tensor = tensors.get(name)
            self.register_parameter(
                name, None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            )
        for name in self._scales:
            self.register_buffer(name, tensors.get(name))

    def _align_rows(self) -> None:
        for name in self._weights:
            parameter = getattr(self, name)
            if parameter is not None:
                aligned = pad_rows(parameter.data)
                if aligned is not parameter.data:
                    parameter.data = aligned

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedWeights:
        """Move tensors as `to`, `cuda`, `to_empty` and others ask, and leave their dtypes."""

        def apply(tensor: Tensor) -> Tensor:
            probe = fn(tensor.new_empty(0))
            if probe.dtype is tensor.dtype:
                return fn(tensor)
            return tensor.to(probe.device)

        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        self._align_rows()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy: `copy.deepcopy` makes tensors contiguous."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._align_rows()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load tensors of the same dtypes; scales may have others that float32 holds."""
        for name in self._weights:
            loaded, own = state_dict.get(prefix + name), getattr(self, name)
            if own is not None and isinstance(loaded, Tensor) and loaded.dtype is not own.dtype:
                error_msgs.append(
                    f"{type(self).__name__}: `{prefix}{name}` must be {name_of(own.dtype)}, got "
                    f"{name_of(loaded.dtype)}"
                )
                state_dict = {key: t for key, t in state_dict.items() if key != prefix + name}
        for name in self._scales:
            loaded = state_dict.get(prefix + name)
            if isinstance(loaded, Tensor) and loaded.dtype in _SCALE_DTYPES:
                state_dict = {**state_dict, prefix + name: scales_to_float32(loaded)}
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        self._align_rows()
