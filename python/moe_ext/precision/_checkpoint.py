"""A checkpoint directory by its headers: which tensors there are, and which layers of experts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from moe_ext.nn._build import Reader
from moe_ext.nn._packed import PackedReader, refuse_mxfp4
from moe_ext.nn._per_expert import EXPERT_NAMES, PerExpertReader
from moe_ext.nn._pieces import quoted
from moe_ext.nn._source import Source
from moe_ext.precision._tensor_files import Entry, meta_tensor, read_header, read_tensor

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_WHOLE = "model.safetensors"
_PER_EXPERT = re.compile(rf"(.+)\.\d+\.({'|'.join(sorted(EXPERT_NAMES))})\.weight")
_PACKED = re.compile(r"(.+)\.(gate_up_proj|up_proj|down_proj)(_blocks)?")
_GATES = ("gate_proj", "gate_up_proj", "w3")
_SHOWN = 3


class CheckpointSource(Source):
    """Tensors of a checkpoint, as readers of weights ask for them."""

    argument = "checkpoint"


class Tensors(Mapping[str, Tensor]):
    """Some of a checkpoint's tensors: read when they are asked for, or without memory."""

    def __init__(self, entries: Mapping[str, Entry], meta: bool) -> None:
        self._entries = entries
        self._meta = meta

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        return meta_tensor(entry) if self._meta else read_tensor(entry)

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class ExpertLayer(NamedTuple):
    """A layer's experts in a checkpoint."""

    prefix: str  # of their names, and the name of the layer in a plan
    entries: dict[str, Entry]
    gated: bool
    packed: bool

    def tensors(self, meta: bool = False) -> Tensors:
        """Return them by their names in the checkpoint."""
        return Tensors(self.entries, meta)

    def reader(self, op: str, *, meta: bool, interleaved: bool = False) -> Reader:
        """Return what knows the names of an expert's matrices."""
        source = CheckpointSource(op, self.tensors(meta), consume=False)
        prefix = f"{self.prefix}."
        if not self.packed:
            return PerExpertReader(source, prefix, self.gated)
        refuse_mxfp4(source, prefix)
        return PackedReader(
            source, prefix, gated=self.gated, interleaved=interleaved, transposed=None
        )


class Checkpoint:
    """The files of a directory, and what is in them."""

    def __init__(self, op: str, directory: str | Path) -> None:
        """Read the headers.

        Raises:
            ValueError: there is no checkpoint, or files and index do not fit.
            OSError: something cannot be read.
        """
        self.directory = Path(directory)
        if not self.directory.is_dir():
            got = "a file" if self.directory.exists() else "none"
            raise ValueError(
                f"{op}: {self.directory} must be a folder with a safetensors checkpoint, got {got}"
            )
        index = self.directory / INDEX
        self.files = _indexed(op, index) if index.is_file() else _found(op, self.directory)
        self.metadata: dict[Path, dict[str, str]] = {}
        self.entries: dict[str, Entry] = {}
        for path, wanted in self.files.items():
            if not path.is_file():
                raise ValueError(f"{op}: {index} must name files that are there, got {path.name}")
            header = read_header(op, path)
            self.metadata[path] = header.metadata
            for name in wanted if wanted is not None else header.entries:
                if name not in header.entries:
                    raise ValueError(
                        f'{op}: {path} must hold "{name}", as {INDEX} says, got '
                        f"{_listed(header.entries)}"
                    )
                if name in self.entries:
                    raise ValueError(
                        f'{op}: one file must hold "{name}", got {self.entries[name].path.name} '
                        f"and {path.name}"
                    )
            # In the order of the file, which an index need not have.
            kept = header.entries if wanted is None else frozenset(wanted)
            self.entries |= {n: e for n, e in header.entries.items() if n in kept}

    def config(self, op: str) -> dict[str, Any]:
        """Return what config.json says; nothing where there is none."""
        path = self.directory / CONFIG
        if not path.is_file():
            return {}
        try:
            value = json.loads(path.read_text())
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ValueError(f"{op}: {path} must be a JSON object, got something else")
        return value

    def layers(self) -> dict[str, ExpertLayer]:
        """Return the layers with experts by their prefix, in the order of their numbers."""
        per_expert, packed = set(), set()
        for name, entry in self.entries.items():
            if found := _PER_EXPERT.fullmatch(name):
                per_expert.add(found[1])
            elif (found := _PACKED.fullmatch(name)) and (len(entry.shape) == 3 or found[3]):
                packed.add(found[1])
        members: dict[str, dict[str, Entry]] = {prefix: {} for prefix in per_expert | packed}
        for name, entry in self.entries.items():
            for prefix in _prefixes(name):
                if prefix in members:
                    members[prefix][name] = entry
        layers = {}
        for prefix in sorted(members, key=_in_order):
            own = members[prefix]
            parts = {part for name in own for part in name[len(prefix) + 1 :].split(".")}
            gated = any(part.startswith(_GATES) for part in parts)
            layers[prefix] = ExpertLayer(prefix, own, gated, prefix not in per_expert)
        return layers

    def layer(self, op: str, name: str) -> ExpertLayer:
        """Return one layer by its prefix."""
        layers = self.layers()
        if name not in layers:
            raise ValueError(
                f"{op}: {self.directory} must have experts named {quoted(name)}, got "
                f"{_listed(layers)}"
            )
        return layers[name]


def _indexed(op: str, index: Path) -> dict[Path, tuple[str, ...] | None]:
    """Return the tensors of each file that an index names."""
    try:
        names = json.loads(index.read_text())["weight_map"]
        pairs = [(name, file) for name, file in names.items() if isinstance(file, str)]
        if len(pairs) != len(names) or any(Path(file).name != file for _, file in pairs):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            f"{op}: {index} must be a JSON object whose weight_map says the file of each tensor, "
            "got something else"
        ) from None
    files: dict[Path, tuple[str, ...] | None] = {}
    members: dict[str, list[str]] = {}
    for name, file in pairs:
        members.setdefault(file, []).append(name)
    for file in sorted(members):
        files[index.parent / file] = tuple(members[file])
    if not files:
        raise ValueError(f"{op}: {index} must name tensors, got none")
    return files


def _found(op: str, directory: Path) -> dict[Path, tuple[str, ...] | None]:
    # Some publish the same weights a second time, under names of their own.
    whole = directory / _WHOLE
    files = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{op}: {directory} must hold {INDEX} or *.safetensors, got neither")
    return dict.fromkeys(files)


def _prefixes(name: str) -> Iterator[str]:
    """Return all that ends before a dot of a name."""
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)


def _in_order(name: str) -> list[tuple[int, int, str]]:
    """Sort numbers in names as numbers."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)
    ]


def _listed(names: Mapping[str, object]) -> str:
    shown = ", ".join(quoted(name) for name in list(names)[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "") or "none"
