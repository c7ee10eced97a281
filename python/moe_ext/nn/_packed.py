"""Checkpoints that hold the matrices of all experts in one tensor: `gate_up_proj`, `down_proj`."""

from __future__ import annotations

from torch import Tensor

from moe_ext._fused_moe_scales import block_shapes
from moe_ext._scales import SCALE_BLOCK
from moe_ext.nn._per_expert import check_scale_presence
from moe_ext.nn._pieces import FP8, Piece, check_dtype, check_shape, classify_scale, quoted
from moe_ext.nn._source import Source

_SCALES = ("_scale_inv", "_scale")
_INPUT_SCALES = ("_activation_scale", "_input_scale")
_DOWN = "down_proj"
_MXFP4 = tuple(
    f"{name}_{part}" for name in ("gate_up_proj", "up_proj", _DOWN) for part in ("blocks", "scales")
)


def refuse_mxfp4(source: Source, prefix: str) -> None:
    """Raise a ValueError for weights of four bits, as gpt-oss is published with."""
    found = [f"{prefix}{name}" for name in _MXFP4 if f"{prefix}{name}" in source]
    if found:
        raise ValueError(
            f"{source.op}: `{source.argument}` must have weights in bfloat16, float16, float32 or "
            f"float8_e4m3fn, got MXFP4 ({', '.join(map(quoted, found))}), which is not supported: "
            "dequantise it to bfloat16 first"
        )


class PackedReader:
    """Matrices of experts, stacked.

    `gate_up_proj` (experts, 2 * intermediate, hidden) and `down_proj` (experts, hidden,
    intermediate), or both transposed; ungated experts have `up_proj`. Beside them, with the ends
    _bias, _scale_inv or _scale, _activation_scale or _input_scale, what else there is.
    """

    def __init__(
        self,
        source: Source,
        prefix: str,
        *,
        gated: bool,
        interleaved: bool,
        transposed: bool | None,
    ) -> None:
        self._source = source
        self._op = source.op
        self._gated = gated
        self._rows_per_feature = 2 if gated else 1
        self._splits = gated and not interleaved
        self._first = f"{prefix}{'gate_up_proj' if gated else 'up_proj'}"
        self._down = f"{prefix}{_DOWN}"
        self._names = {"w13": self._first, "w2": self._down}
        self._transposed = transposed
        if self.found:
            if self._transposed is None:
                self._transposed = self._looks_transposed()
            self.num_experts = self._source[self._first].shape[0]
            # What follows does not depend on the expert.
            self._weights = {stage: self._weight(stage) for stage in self._names}
            self._parts = {stage: self._read(stage) for stage in self._names}

    @property
    def found(self) -> bool:
        """Whether there are such tensors."""
        return self._first in self._source or self._down in self._source

    def _looks_transposed(self) -> bool:
        """Whether `gate_up_proj` ends with its 2 * intermediate columns."""
        if not self._gated:  # (experts, a, b) and (experts, b, a) either way
            return False
        first, down = self._source[self._first], self._source[self._down]
        return (
            first.dim() == 3
            and down.dim() == 3
            and first.shape[1:] == (down.shape[2], 2 * down.shape[1])
        )

    def _weight(self, stage: str) -> Tensor:
        weight = self._source[self._names[stage]]
        if weight.dim() != 3:
            raise ValueError(
                f"{self._op}: `{self._names[stage]}` must have three dimensions, got shape "
                f"{tuple(weight.shape)}"
            )
        return weight.mT if self._transposed else weight

    def _read(self, stage: str) -> tuple[Tensor | None, str, Tensor | None, Tensor | None]:
        """Return scale (experts first or ()), its name, bias and input scale."""
        name, weight = self._names[stage], self._weights[stage]
        scale_name, scale = self._source.first_of(name + end for end in _SCALES)
        check_scale_presence(self._op, name, weight.dtype is FP8, scale_name, scale is not None)
        if scale is not None:
            if scale.dim() == 3 and self._transposed:
                scale = scale.mT
            if scale.dim() not in (0, 4) and scale.shape[0] == 1 < weight.shape[0]:
                scale = scale.reshape(()) if scale.numel() == 1 else scale
        bias = self._source.optional(f"{name}_bias")
        if bias is not None:
            form, shape = "(experts, rows of the weight)", tuple(weight.shape[:2])
            check_shape(self._op, f"{name}_bias", bias, form, shape)
        static_name, static = self._source.first_of(name + end for end in _INPUT_SCALES)
        if static is not None and static.numel() not in (1, weight.shape[0]):
            raise ValueError(
                f"{self._op}: `{static_name}` must have shape (), (1,) or (experts,) = "
                f"({weight.shape[0]},), got {tuple(static.shape)}"
            )
        return scale, scale_name, bias, static

    def check(self, experts: range) -> tuple[int, int]:
        """Raise a ValueError for the first part that does not fit; return hidden and intermediate.

        Looks at shapes and dtypes alone.
        """
        first, down = self._weights["w13"], self._weights["w2"]
        check_dtype(self._op, self._first, first, self._first, first.dtype)
        check_dtype(self._op, self._down, down, self._first, first.dtype)
        n, hidden = first.shape[1:]
        if n % self._rows_per_feature:
            raise ValueError(
                f"{self._op}: `{self._first}` must have an even number of gate and up rows, got {n}"
            )
        intermediate = n // self._rows_per_feature
        shape: tuple[int, ...] = (first.shape[0], hidden, intermediate)
        form = "(experts, hidden, intermediate)"
        if self._transposed:
            shape, form = (shape[0], *shape[:0:-1]), "(experts, intermediate, hidden)"
        check_shape(self._op, self._down, self._source[self._down], form, shape)
        for stage in self._names:
            self.matrices(stage, experts[0])
        return hidden, intermediate

    def matrices(self, stage: str, expert: int) -> tuple[Piece, ...]:
        """Return gate and up (or both in one, or up alone) for "w13", down for "w2"; views."""
        name, weight = self._names[stage], self._weights[stage]
        scales, scale_name, biases, input_scales = self._parts[stage]
        num_experts, n, k = weight.shape
        bias = None if biases is None else biases[expert]
        static = None
        if input_scales is not None:
            static = input_scales.reshape(-1)[expert if input_scales.numel() > 1 else 0]
        whole = Piece(name, weight[expert], 1, bias=bias, input_scale=static)
        if stage == "w13":
            whole = whole._replace(rows_per_feature=self._rows_per_feature)
        splits = stage == "w13" and self._splits
        if scales is not None and scales.dim() == 4:
            _, segments = block_shapes(num_experts, n, k)
            if not splits:
                segments = (num_experts, *segments[2:])
            check_shape(self._op, scale_name, scales, "of blocks", segments)
            return self._halves(whole, tuple(scales[expert]))
        if scales is not None:
            own = scales
            if scales.dim():
                self._check_experts(scale_name, scales, num_experts)
                own = scales[expert]
            scale, layout = classify_scale(self._op, scale_name, own, n, k)
            whole = whole._replace(scale=scale, layout=layout)
        if not splits:
            return (whole,)
        if whole.scale is None or whole.layout == "tensor":
            return self._halves(whole, (whole.scale, whole.scale))
        if whole.layout == "block" and n // 2 % SCALE_BLOCK:
            return (whole._replace(divisible=False),)
        return self._halves(whole, whole.scale.chunk(2))

    def _check_experts(self, name: str, tensor: Tensor, num_experts: int) -> None:
        if tensor.shape[0] != num_experts:
            raise ValueError(
                f"{self._op}: `{name}` must have {num_experts} experts, got shape "
                f"{tuple(tensor.shape)}"
            )

    def _halves(self, whole: Piece, scales: tuple[Tensor | None, ...]) -> tuple[Piece, ...]:
        """Return gate and up, with a scale each."""
        biases = (None, None) if whole.bias is None else whole.bias.chunk(2)
        layout = whole.layout if scales[0] is None or scales[0].dim() != 2 else "block"
        return tuple(
            Piece(whole.name, weight, 1, scale, layout, bias, whole.input_scale)
            for weight, scale, bias in zip(whole.weight.chunk(2), scales, biases, strict=True)
        )

    def whole(self, stage: str) -> Tensor | None:
        """Return the weights of all experts as they are, None where they are not so."""
        return None if self._transposed else self._weights[stage]

    def release(self, stage: str, expert: int, is_last: bool) -> None:
        """Let go of what `matrices` returned, once that was the last expert."""
        if is_last:
            name = self._names[stage]
            ends = ("", "_bias", *_SCALES, *_INPUT_SCALES)
            self._source.release([name + end for end in ends])
            del self._weights[stage], self._parts[stage]
