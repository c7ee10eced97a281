"""`calibrate_checkpoint`: statistics of a checkpoint on disk, from hidden states on disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ext.nn._arguments import is_int, shown
from moe_ext.nn._pieces import quoted
from moe_ext.nn.experts import Experts
from moe_ext.precision._capture import first_not_finite, routed
from moe_ext.precision._checkpoint import Checkpoint, ExpertLayer
from moe_ext.precision._measure import Measurement
from moe_ext.precision._model_states import hidden_states_of
from moe_ext.precision._routers import Router, expert_options
from moe_ext.precision._tensor_files import Entry, read_header, read_tensor
from moe_ext.precision.calibration import layouts_of, stats_of
from moe_ext.precision.stats import PrecisionStats

_OP = "calibrate_checkpoint"
_PARTS = ("hidden_states", "topk_ids", "topk_weights")
_IDS = "input_ids"

Parts = dict[str, Entry | Tensor]
"""Of one layer by their names: read when they are needed, or there already."""


@dataclass(frozen=True)
class CalibratedCheckpoint:
    """What `calibrate_checkpoint` found.

    Attributes:
        stats: of all layers with experts.
        without_tokens: layers that the data has nothing for, judged from their weights alone.
    """

    stats: PrecisionStats
    without_tokens: tuple[str, ...]


@torch.no_grad()
def calibrate_checkpoint(
    directory: str | Path,
    data: str | Path,
    *,
    scales: str | Mapping[str, str] = "block",
    min_rows: int = 32,
    activation: str | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CalibratedCheckpoint:
    """Measure what FP8 does to every layer with experts, one layer in memory at a time.

    Args:
        directory: a safetensors checkpoint in bfloat16, float16 or float32, with its config.json.
        data: a safetensors file with hidden states as they reach the layers: for the layer with
            the number N `layers.N.hidden_states`, (..., hidden_size), in any floating dtype; or
            with the experts' prefix in place of `layers.N`. Beside them `topk_ids` and
            `topk_weights`, (..., top_k), if not the checkpoint's router is to choose. Or
            `input_ids` alone, (sequences, length), which the model turns into hidden states: needs
            Transformers, and memory for the whole model meanwhile.
        scales: see `calibrate`.
        min_rows: see `calibrate`.
        activation: of the experts; None is what config.json says.
        device: to measure on; None is the CPU.
        progress: called with how many layers are done, and how many there are.

    Returns:
        The statistics by the prefixes of experts, as plans name layers.

    Raises:
        ValueError: an argument differs from the above, checkpoint and data do not fit, the data has
            no token for any layer, or inputs or outputs of a layer are not finite.
        OSError: a file cannot be read.

    Notes:
        Each layer is judged by its own output: nothing is known here of the model's.
    """
    layouts = layouts_of(scales)
    if not is_int(min_rows) or min_rows < 1:
        raise ValueError(f"{_OP}: `min_rows` must be an int of at least 1, got {shown(min_rows)}")
    checkpoint = Checkpoint(_OP, directory)
    config = checkpoint.config(_OP)
    layers = checkpoint.layers()
    if not layers:
        raise ValueError(f"{_OP}: {checkpoint.directory} must have layers of experts, got none")
    path = Path(data)
    entries = read_header(_OP, path).entries
    if set(entries) == {_IDS}:
        parts = _parts_of_ids(
            layers, checkpoint, entries[_IDS], "cpu" if device is None else device
        )
    else:
        parts = _parts_of(layers, path, entries)
    found = {}
    for done, (name, layer) in enumerate(layers.items()):
        experts = _experts_of(layer, config, activation, device)
        own = Measurement(experts, layouts)
        if name in parts:
            tokens = _tokens_of(checkpoint, config, name, experts, parts[name])
            call = routed(experts, *(tensor.to(experts.w2.device) for tensor in tokens))
            if wrong := first_not_finite(call, experts.num_experts):
                inputs = _said_of(wrong.part, name, path, parts[name], entries)
                raise ValueError(f"{_OP}: {wrong.describe(inputs)}, counted from 0")
            own.add([call])
        found[name] = stats_of(name, own, min_rows)
        if progress is not None:
            progress(done + 1, len(layers))
    if not any(bool(stats.rows.any()) for stats in found.values()):
        raise ValueError(
            f"{_OP}: {path} must hold tokens that reach an expert, got none: `layers.N."
            "hidden_states`, N being the number of a layer"
        )
    without = tuple(name for name, stats in found.items() if not bool(stats.rows.any()))
    return CalibratedCheckpoint(PrecisionStats(found), without)


def _said_of(part: str, name: str, path: Path, own: Parts, entries: Mapping[str, Entry]) -> str:
    """Say where inputs of a layer are from: a tensor of the data, or what was made of it."""
    given = own.get(part)
    for key, entry in entries.items():
        if entry is given:
            return f"{quoted(key)} of {path}"
    by = "the checkpoint's router" if given is None else "the model"
    return f"the {part} of {quoted(name)}, by {by},"


def _by_number(layers: Mapping[str, ExpertLayer]) -> dict[str, list[str]]:
    """Return the layers that "layers.N" may mean; more than one where a model has two stacks."""
    found: dict[str, list[str]] = {}
    for name in layers:
        if number := re.search(r"(?:^|\.)layers\.(\d+)\.", f"{name}."):
            found.setdefault(f"layers.{int(number[1])}", []).append(name)
    return found


def _parts_of_ids(
    layers: Mapping[str, ExpertLayer],
    checkpoint: Checkpoint,
    entry: Entry,
    device: torch.device | str,
) -> dict[str, Parts]:
    """Return hidden states of each layer that the model itself has made of token ids."""
    ids = read_tensor(entry)
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype is torch.bool or not ids.numel():
        raise ValueError(
            f"{_OP}: {_IDS} must be whole numbers of shape (sequences, length), got {ids.dtype} "
            f"{tuple(ids.shape)}"
        )
    found = hidden_states_of(_OP, checkpoint.directory, ids, device)
    numbers = _by_number(layers)
    return {
        names[0]: {"hidden_states": found[int(key.removeprefix("layers."))]}
        for key, names in numbers.items()
        if len(names) == 1 and int(key.removeprefix("layers.")) in found
    }


def _parts_of(
    layers: Mapping[str, ExpertLayer], path: Path, entries: Mapping[str, Entry]
) -> dict[str, Parts]:
    """Return the data of each layer by the part's name."""
    by_number = _by_number(layers)
    parts: dict[str, Parts] = {}
    for key, entry in entries.items():
        base, _, part = key.rpartition(".")
        names = [base] if base in layers else by_number.get(base, [])
        if part not in _PARTS or len(names) != 1:
            some = ", ".join(list(by_number)[:3]) or ", ".join(map(quoted, list(layers)[:3]))
            got = quoted(key) + (f", which {' and '.join(names)} may be" if names[1:] else "")
            raise ValueError(
                f"{_OP}: {path} must hold {', '.join(_PARTS)} of layers ({some}, ...), got {got}"
            )
        parts.setdefault(names[0], {})[part] = entry
    for name, own in parts.items():
        if "hidden_states" not in own or len(own) == 2:
            raise ValueError(
                f"{_OP}: {path} must hold hidden_states of {quoted(name)}, alone or with topk_ids "
                f"and topk_weights, got {', '.join(own)}"
            )
    return parts


def _experts_of(
    layer: ExpertLayer,
    config: Mapping[str, Any],
    activation: str | None,
    device: torch.device | str | None,
) -> Experts:
    options = expert_options(_OP, {} if activation else config, layer.gated)
    if activation is not None:
        options["activation"] = activation
    experts = Experts.from_state_dict(
        layer.tensors(), prefix=layer.prefix, device=device, **options
    )
    if experts.w13.dtype is not torch.bfloat16:
        raise ValueError(
            f"{_OP}: the experts of {quoted(layer.prefix)} must be bfloat16, float16 or float32, "
            "got float8_e4m3fn"
        )
    return experts


def _tokens_of(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    name: str,
    experts: Experts,
    parts: Parts,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, weights and ids of a layer's tokens."""
    hidden = _tensor(parts["hidden_states"])
    wanted = (*hidden.shape[:-1], experts.hidden_size)
    if tuple(hidden.shape) != wanted or not hidden.is_floating_point():
        raise ValueError(
            f"{_OP}: the hidden_states of {quoted(name)} must be floating and have "
            f"{experts.hidden_size} columns, got {hidden.dtype} {tuple(hidden.shape)}"
        )
    hidden = hidden.reshape(-1, experts.hidden_size).bfloat16()
    if "topk_ids" not in parts:
        return (hidden, *Router(_OP, checkpoint, config, name)(hidden))
    ids, weights = (_tensor(parts[part]) for part in _PARTS[1:])
    if (
        ids.shape != weights.shape
        or ids.dim() < 1
        or ids.numel() != hidden.shape[0] * ids.shape[-1]
        or ids.is_floating_point()
        or not weights.is_floating_point()
    ):
        raise ValueError(
            f"{_OP}: topk_ids and topk_weights of {quoted(name)} must be whole and floating, of "
            f"one shape, with a row for each of {hidden.shape[0]} hidden states, got "
            f"{ids.dtype} {tuple(ids.shape)} and {weights.dtype} {tuple(weights.shape)}"
        )
    if ids.numel() and int(ids.max()) >= experts.num_experts:
        raise ValueError(
            f"{_OP}: topk_ids of {quoted(name)} must be below the {experts.num_experts} experts of "
            f"the checkpoint, got {int(ids.max())}"
        )
    rows = (hidden.shape[0], ids.shape[-1])
    return hidden, weights.float().reshape(rows), ids.reshape(rows)


def _tensor(part: Entry | Tensor) -> Tensor:
    return part if isinstance(part, Tensor) else read_tensor(part)
