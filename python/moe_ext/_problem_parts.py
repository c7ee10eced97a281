"""Parts of a problem given by sizes: which there are for each op, and values of what kind."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ext._words import brief
from moe_ext.combine_tokens import combine_tokens
from moe_ext.fused_moe import fused_moe
from moe_ext.fused_moe_masked import fused_moe_masked
from moe_ext.grouped_gemm import grouped_gemm
from moe_ext.grouped_gemm_masked import grouped_gemm_masked
from moe_ext.quantize import quantize_fp8
from moe_ext.routing import topk_routing
from moe_ext.sort_tokens import sort_tokens


class Kind(NamedTuple):
    """What values are, in words, and whether one is."""

    words: str
    holds: Callable[[Any], bool]

    def or_none(self) -> Kind:
        """Return the kind that None is of as well."""
        return Kind(f"{self.words} or None", lambda value: value is None or self.holds(value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_whole(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_whole, value))


def _becomes(convert: Callable[[Any], object], value: Any) -> bool:
    if isinstance(value, str):
        return False
    try:
        convert(value)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return False
    return True


def _has_truth(value: Any) -> bool:
    return value is None or hasattr(type(value), "__bool__")


_WHOLE = Kind("an int", _is_whole)
_DTYPE = Kind("a torch.dtype or a str", lambda value: isinstance(value, (torch.dtype, str)))
_SHAPE = Kind("a sequence of ints", _are_whole)
_STR = Kind("a str", lambda value: isinstance(value, str))
_GIVEN = Kind("True, False", lambda value: isinstance(value, bool)).or_none()
_SCALE = Kind("a str, a shape", lambda value: isinstance(value, str) or _are_whole(value)).or_none()
_KINDS = {
    "int": Kind("an int", functools.partial(_becomes, operator.index)),
    "float": Kind("a number", functools.partial(_becomes, float)),
    "bool": Kind("True or False", _has_truth),
    "str": _STR,
    "Tensor": Kind("a tensor", lambda value: isinstance(value, Tensor)),
    "torch.dtype": _DTYPE,
    "Sequence[int]": _SHAPE,
}
"""By the annotation of an op's argument: what torch takes for it."""
_FORMS = {
    **dict.fromkeys(("scale_a", "scale_b", "w13_scale", "w2_scale"), _SCALE),
    **dict.fromkeys(("a1_scale", "a2_scale", "bias", "w13_bias", "w2_bias"), _GIVEN),
    **dict.fromkeys(("correction_bias", "addend"), _GIVEN),
}
"""Of arguments that are tensors, and in a problem a word, a shape or whether there is one."""
_GEMM = {"dtype": _DTYPE, "num_groups": _WHOLE, "n": _WHOLE, "k": _WHOLE}
_LAYER = {
    "dtype": _DTYPE,
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_experts"), _WHOLE),
}
_TOKENS = {"num_tokens": _WHOLE, "top_k": _WHOLE}
_NEEDED: dict[Callable[..., Any], dict[str, Kind]] = {
    grouped_gemm: _GEMM | {"num_rows": _WHOLE},
    grouped_gemm_masked: _GEMM | {"max_rows": _WHOLE},
    fused_moe: _LAYER | _TOKENS,
    fused_moe_masked: _LAYER | {"max_rows": _WHOLE},
    quantize_fp8: {"dtype": _DTYPE, "shape": _SHAPE, "granularity": _STR},
    topk_routing: _TOKENS | {"num_experts": _WHOLE},
    sort_tokens: _TOKENS | {"num_experts": _WHOLE},
    combine_tokens: _TOKENS | {"hidden_size": _WHOLE},
}
"""Parts without which there is no problem."""
_MAY_BE: dict[Callable[..., Any], dict[str, Kind]] = {
    topk_routing: {"dtype": _DTYPE},
    sort_tokens: {"dtype": _DTYPE},
}
"""Others that are no options of the op."""
_BY_NAME = {op.__name__: op for op in _NEEDED}


@functools.cache
def _parts(op: Callable[..., Any]) -> dict[str, Kind]:
    """Return all parts of an op's problems, its options by their names among them."""
    parts = _NEEDED[op] | _MAY_BE.get(op, {})
    for name, parameter in inspect.signature(op).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in parts:
            annotation = str(parameter.annotation)
            kind = _KINDS[annotation.removesuffix(" | None")]
            parts[name] = _FORMS.get(name) or (
                kind.or_none() if annotation.endswith(" | None") else kind
            )
    return parts


def check_parts(asker: str, op: str, problem: Mapping[str, Any]) -> None:
    """Raise a TypeError unless a problem has the parts of an op's, each of its kind.

    Of sizes that are negative it raises a ValueError: there is a problem, and it does not run.

    Args:
        asker: who is asked, for the message.
        op: the op's name.
        problem: what is given.
    """
    parts, needed = _parts(_BY_NAME[op]), _NEEDED[_BY_NAME[op]]
    for part, value in problem.items():
        kind = parts.get(part)
        if kind is None:
            raise TypeError(
                f"{asker}: a problem of {op} must have no parts but {', '.join(parts)}, got {part}"
            )
        if not kind.holds(value):
            raise TypeError(f"{asker}: `{part}` must be {kind.words}, got {brief(value)}")
        if kind is _WHOLE and value < 0:
            raise ValueError(f"{asker}: `{part}` must not be negative, got {value}")
    missing = [part for part in needed if part not in problem]
    if missing:
        raise TypeError(
            f"{asker}: a problem of {op} must have {', '.join(needed)}, got none of "
            f"{', '.join(missing)}"
        )
