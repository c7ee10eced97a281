"""Checkpoints that hold each expert's matrices under their own names: `3.gate_proj.weight`."""

from __future__ import annotations

import re

from torch import Tensor

from moe_ext.nn._pieces import FP8, Piece, check_dtype, check_shape, classify_scale
from moe_ext.nn._source import Source

_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_UNGATED_NAMES = (("up_proj", "down_proj"), ("w1", "w2"))
EXPERT_NAMES = frozenset(name for names in _NAMES for name in names)
"""What an expert's matrices are called."""
_SCALES = ("weight_scale_inv", "weight_scale")
_INPUT_SCALES = ("input_scale", "activation_scale")
_PARTS = ("weight", "bias", *_SCALES, *_INPUT_SCALES)


class PerExpertReader:
    """Matrices of experts by name.

    Names of gate, up and down: gate_proj, up_proj, down_proj, or w1, w3, w2. Their parts: weight,
    bias, weight_scale_inv or weight_scale, input_scale or activation_scale.
    """

    def __init__(self, source: Source, prefix: str, gated: bool) -> None:
        self._source = source
        self._prefix = prefix
        self._op = source.op
        self._keys: dict[int, list[str]] = {}
        for name in source:
            if found := re.match(re.escape(prefix) + r"(\d+)\.", name):
                self._keys.setdefault(int(found[1]), []).append(name)
        self.num_experts = max(self._keys, default=-1) + 1
        known = _NAMES if gated else _UNGATED_NAMES
        present = {
            name.removeprefix(f"{prefix}{index}.").partition(".")[0]
            for index, names in self._keys.items()
            for name in names
        }
        # The names of which most are there, so that a message asks for the one that is missing.
        self._names = max(known, key=lambda names: len(present.intersection(names)))

    @property
    def found(self) -> bool:
        """Whether there is any expert."""
        return bool(self._keys)

    def matrices(self, stage: str, expert: int) -> tuple[Piece, ...]:
        """Return gate and up (or up alone) for the stage "w13", down for "w2"; views."""
        names = self._names[:-1] if stage == "w13" else self._names[-1:]
        return tuple(self._piece(f"{self._prefix}{expert}.{name}") for name in names)

    def check(self, experts: range) -> tuple[int, int]:
        """Raise a ValueError for the first part that does not fit; return hidden and intermediate.

        Looks at shapes and dtypes alone.
        """
        first = self._piece(f"{self._prefix}{experts[0]}.{self._names[0]}")
        intermediate, hidden = first.weight.shape
        for expert in experts:
            self._check_names(expert)
            pieces = (*self.matrices("w13", expert), *self.matrices("w2", expert))
            for piece in pieces:
                check_dtype(self._op, piece.name, piece.weight, first.name, first.weight.dtype)
            for piece in pieces[:-1]:
                form = "(intermediate, hidden)"
                check_shape(self._op, piece.name, piece.weight, form, (intermediate, hidden))
            down = pieces[-1]
            form = "(hidden, intermediate)"
            check_shape(self._op, down.name, down.weight, form, (hidden, intermediate))
        return hidden, intermediate

    def whole(self, stage: str) -> Tensor | None:
        """Return None: there is no tensor of all experts."""

    def release(self, stage: str, expert: int, is_last: bool) -> None:
        """Let go of what `matrices` returned."""
        names = self._names[:-1] if stage == "w13" else self._names[-1:]
        bases = tuple(f"{self._prefix}{expert}.{name}." for name in names)
        self._source.release([key for key in self._keys.get(expert, ()) if key.startswith(bases)])

    def _check_names(self, expert: int) -> None:
        known = {f"{self._prefix}{expert}.{name}.{part}" for name in self._names for part in _PARTS}
        for key in self._keys.get(expert, ()):
            if key not in known:
                raise ValueError(
                    f"{self._op}: `{self._source.argument}` must hold nothing of an expert but "
                    f"{', '.join(self._names)} with {', '.join(_PARTS)}, got "
                    f'"{key}"'
                )

    def _piece(self, base: str) -> Piece:
        name = f"{base}.weight"
        weight = self._source[name]
        if weight.dim() != 2:
            raise ValueError(
                f"{self._op}: `{name}` must have two dimensions, got shape {tuple(weight.shape)}"
            )
        n, k = weight.shape
        scale_name, scale = self._source.first_of(f"{base}.{part}" for part in _SCALES)
        check_scale_presence(self._op, name, weight.dtype is FP8, scale_name, scale is not None)
        layout = None
        if scale is not None:
            scale, layout = classify_scale(self._op, scale_name, scale, n, k)
        bias = self._source.optional(f"{base}.bias")
        if bias is not None:
            check_shape(self._op, f"{base}.bias", bias, "(rows of the weight,)", (n,))
        input_name, static = self._source.first_of(f"{base}.{part}" for part in _INPUT_SCALES)
        if static is not None:
            if static.numel() != 1:
                raise ValueError(
                    f"{self._op}: `{input_name}` must have shape () or (1,), got "
                    f"{tuple(static.shape)}"
                )
            static = static.reshape(())
        return Piece(name, weight, 1, scale, layout, bias, static)


def check_scale_presence(op: str, name: str, fp8: bool, scale_name: str, present: bool) -> None:
    """Raise a ValueError unless FP8 weights, and they alone, have a scale."""
    if fp8 and not present:
        raise ValueError(
            f"{op}: `{scale_name}` must be there, since `{name}` is float8_e4m3fn, got none"
        )
    if present and not fp8:
        raise ValueError(
            f"{op}: `{scale_name}` must not be there unless `{name}` is float8_e4m3fn, got one"
        )
