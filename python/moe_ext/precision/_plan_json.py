"""A `PrecisionPlan` as JSON: the form, its version, and what is wrong with a text that is none."""

from __future__ import annotations

import json
from typing import Any

from moe_ext.nn._arguments import is_int, shown
from moe_ext.nn._pieces import quoted
from moe_ext.precision.layer_plan import (
    STAGES,
    LayerPlan,
    StagePlan,
    check_layer,
    check_num_experts,
)
from moe_ext.precision.plan import PrecisionPlan

FORMAT = "moe_ext.precision_plan"
VERSION = 1
_OP = "PrecisionPlan"
_ALL = "all"


def write_plan(plan: PrecisionPlan) -> str:
    """Return a plan as JSON, a layer to a line, so that plans can be compared by line."""
    lines = [
        f"    {json.dumps(name)}: {json.dumps(layer_value(layer))}"
        for name, layer in plan.layers.items()
    ]
    layers = "{\n" + ",\n".join(lines) + "\n  }" if lines else "{}"
    head = f'  "format": {json.dumps(FORMAT)},\n  "version": {VERSION},\n'
    return "{\n" + head + f'  "layers": {layers}\n' + "}\n"


def layer_value(layer: LayerPlan) -> dict[str, Any]:
    """Return a layer's part of the JSON."""
    value: dict[str, Any] = {"num_experts": layer.num_experts}
    for name in STAGES:
        stage = layer.stage(name)
        is_all = len(stage.bf16) == layer.num_experts
        value[name] = {"scales": stage.scales, "bf16": _ALL if is_all else list(stage.bf16)}
    return value


def read_plan(text: str) -> PrecisionPlan:
    """Return the plan that a text holds, or raise a ValueError that says what is wrong where."""
    if not isinstance(text, str):
        raise ValueError(f"{_OP}: `text` must be a string, got {shown(text)}")
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{_OP}: the text must be JSON, got {error.msg} at line {error.lineno}, column "
            f"{error.colno}"
        ) from None
    except RecursionError:
        raise ValueError(f"{_OP}: the text must be JSON, got values nested too deep") from None
    check_header(_OP, value, FORMAT, VERSION)
    _check_keys("the plan", value, ("format", "version", "layers"))
    layers = value["layers"]
    if not isinstance(layers, dict):
        raise ValueError(f"{_OP}: `layers` must be an object, got {_json_kind(layers)}")
    return PrecisionPlan(
        {name: read_layer(f"layers[{quoted(name)}]", layer) for name, layer in layers.items()}
    )


def check_header(op: str, value: Any, form: str, version: int) -> None:
    """Raise a ValueError unless a value read from a file says that it has a form, in a version."""
    if not isinstance(value, dict) or value.get("format") != form:
        got = _json_kind(value) if not isinstance(value, dict) else shown(value.get("format"))
        raise ValueError(f"{op}: `format` must be {quoted(form)}, got {got}")
    check_version(op, "version", value.get("version"), version)


def check_version(op: str, name: str, found: Any, newest: int) -> None:
    """Raise a ValueError unless a version that was read is one that is known."""
    if not is_int(found) or not 1 <= found <= newest:
        raise ValueError(
            f"{op}: `{name}` must be an int from 1 to {newest}, which this moe_ext reads, got "
            f"{shown(found)}"
        )


def read_layer(where: str, value: Any) -> LayerPlan:
    """Return a layer's plan of its part of the JSON, which is at a place of the text."""
    _check_keys(f"`{where}`", value, ("num_experts", *STAGES))
    count = value["num_experts"]
    stages = {}
    for stage in STAGES:
        own = value[stage]
        _check_keys(f"`{where}.{stage}`", own, ("scales", "bf16"))
        experts = own["bf16"]
        if experts == _ALL:
            check_num_experts(_OP, f"{where}.", count)  # before a list of so many is made
            experts = list(range(count))
        if not isinstance(experts, list):
            raise ValueError(
                f'{_OP}: `{where}.{stage}.bf16` must be a list of experts or "{_ALL}", got '
                f"{_json_kind(experts)}"
            )
        stages[stage] = StagePlan(own["scales"], tuple(experts))
    # The same checks as of any plan, with the place in the text.
    layer = object.__new__(LayerPlan)
    for key, part in {"num_experts": count, **stages}.items():
        object.__setattr__(layer, key, part)
    check_layer(_OP, f"{where}.", layer)
    return layer


def _check_keys(what: str, value: Any, keys: tuple[str, ...]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{_OP}: {what} must be an object, got {_json_kind(value)}")
    for key in keys:
        if key not in value:
            raise ValueError(f"{_OP}: {what} must have {quoted(key)}, got {_names(value)}")
    for key in value:
        if key not in keys:
            raise ValueError(
                f"{_OP}: {what} must have nothing but {_names(keys)}, got {quoted(key)}"
            )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"{_OP}: a name must not be repeated in an object, got {quoted(key)}")
        value[key] = item
    return value


def _names(keys: Any) -> str:
    return ", ".join(map(quoted, keys)) or "nothing"


def _json_kind(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else shown(value)
