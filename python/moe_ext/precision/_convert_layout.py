"""What a converted checkpoint will hold, down to the byte, from the headers of its source.

Everything that can be wrong with a plan or a checkpoint is found here, before a file is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from moe_ext._activations import INTERLEAVED
from moe_ext.nn._options import check_sizes
from moe_ext.nn._pieces import FP8, Piece, block_grid, quoted
from moe_ext.precision._checkpoint import Checkpoint, ExpertLayer
from moe_ext.precision._slots import WEIGHT
from moe_ext.precision._tensor_files import DTYPES, NAMES, Entry, lay_out
from moe_ext.precision.layer_plan import BF16, STAGES, LayerPlan
from moe_ext.precision.plan import PrecisionPlan

_PROJECTIONS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
SCALE_NAME = {"block": "weight_scale_inv", "channel": "weight_scale", "tensor": "weight_scale"}
"""Behind the name of a matrix in place of `weight`, as checkpoints in FP8 have them."""


class Place(NamedTuple):
    """Where a tensor goes."""

    file: int
    name: str


class View(NamedTuple):
    """A matrix or bias as a view of a tensor in a file."""

    entry: Entry
    offset: int  # of its first element, in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements from the first to the last, those between them included."""
        steps = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)

    @property
    def is_dense(self) -> bool:
        """Whether its elements are in order, one behind the other."""
        dense, step = [], 1
        for size in reversed(self.shape):
            dense.append(step)
            step *= size
        return self.stride == tuple(reversed(dense))

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return self.entry.num_bytes // max(math.prod(self.entry.shape), 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements alone."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def begin(self) -> int:
        """Its first byte in the file."""
        return self.entry.begin + self.offset * self.item_bytes


class Copy(NamedTuple):
    """Bytes that are taken as they are."""

    path: Path
    begin: int
    num_bytes: int
    place: Place


class Quantize(NamedTuple):
    """Matrices of one stage of an expert that become FP8."""

    views: tuple[View, ...]
    layout: str
    places: tuple[Place, ...]
    scales: tuple[Place, ...]


class Rewrite(NamedTuple):
    """A matrix or bias that stays what it is, in another order or, from wider numbers, in BF16."""

    view: View
    dtype: str
    place: Place


Job = Copy | Quantize | Rewrite


@dataclass
class Output:
    """One file to write."""

    name: str
    metadata: dict[str, str]
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = field(default_factory=dict)
    head: bytes = b""
    places: dict[str, int] = field(default_factory=dict)
    size: int = 0

    def lay_out(self) -> None:
        """Fix where everything is."""
        self.head, self.places, self.size = lay_out(self.tensors, self.metadata)


class Layout:
    """Files and jobs of a conversion."""

    def __init__(
        self, op: str, checkpoint: Checkpoint, plan: PrecisionPlan, gate_up_layout: str
    ) -> None:
        self._op = op
        self._checkpoint = checkpoint
        self._interleaved = gate_up_layout == INTERLEAVED
        self.inputs = tuple(checkpoint.files)
        count = len(self.inputs)
        self._file_of = {path: index for index, path in enumerate(self.inputs)}
        self.outputs = [
            Output(f"model-{index + 1:05d}-of-{count:05d}.safetensors", checkpoint.metadata[path])
            for index, path in enumerate(self.inputs)
        ]
        self.jobs: list[Job] = []
        self.num_fp8 = 0
        layers = checkpoint.layers()
        self.unplanned = tuple(name for name in layers if name not in plan.layers)
        taken: set[str] = set()
        for name, own in plan.layers.items():
            if name not in layers:
                known = ", ".join(map(quoted, list(layers)[:3])) or "none"
                more = ", ..." if len(layers) > 3 else ""
                raise ValueError(
                    f"{op}: the plan must name layers of experts that the checkpoint has ({known}"
                    f"{more}), got {quoted(name)}"
                )
            taken |= self._add_layer(layers[name], own)
        for name, entry in checkpoint.entries.items():
            if name not in taken:
                self._add(Copy(entry.path, entry.begin, entry.num_bytes, self._put(name, entry)))
        for output in self.outputs:
            output.lay_out()
        # Front to back, as disks and the system's read-ahead like it.
        self.jobs.sort(key=_position)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(output.size for output in self.outputs)

    @property
    def input_bytes(self) -> int:
        """Bytes of all tensors of the checkpoint."""
        return sum(entry.num_bytes for entry in self._checkpoint.entries.values())

    def _add(self, job: Job) -> None:
        self.jobs.append(job)

    def _put(self, name: str, entry: Entry) -> Place:
        return self._tensor(self._file_of[entry.path], name, entry.dtype, entry.shape, entry)

    def _tensor(
        self, file: int, name: str, dtype: str, shape: tuple[int, ...], entry: Entry | None = None
    ) -> Place:
        count = entry.num_bytes if entry else math.prod(shape) * DTYPES[dtype].itemsize
        self.outputs[file].tensors[name] = (dtype, shape, count)
        return Place(file, name)

    def _add_layer(self, layer: ExpertLayer, plan: LayerPlan) -> set[str]:
        """Add the jobs of a layer's experts; return the tensors that they take."""
        op = self._op
        reader = layer.reader(op, meta=True, interleaved=self._interleaved)
        if reader.num_experts != plan.num_experts:
            raise ValueError(
                f"{op}: the plan must have {reader.num_experts} experts in {quoted(layer.prefix)}, "
                f"as the checkpoint, got {plan.num_experts}"
            )
        sizes = reader.check(range(plan.num_experts))
        check_sizes(op, plan.num_experts, *sizes)
        taken: set[str] = set()
        for stage in STAGES:
            for expert, kind in enumerate(plan.kinds(stage)):
                pieces = tuple(_split(reader.matrices(WEIGHT[stage], expert)))
                self._add_stage(layer, expert, stage, pieces, kind, plan.stage(stage).scales)
                taken |= {piece.name for piece in pieces}
                if layer.packed and pieces[0].bias is not None:
                    taken.add(f"{pieces[0].name}_bias")
        return taken

    def _add_stage(
        self,
        layer: ExpertLayer,
        expert: int,
        stage: str,
        pieces: tuple[Piece, ...],
        kind: str,
        scales: str,
    ) -> None:
        if pieces[0].weight.dtype is FP8:
            raise ValueError(
                f"{self._op}: `{pieces[0].name}` must be bfloat16, float16 or float32, got "
                "float8_e4m3fn, which is quantised already"
            )
        names = self._names(layer, expert, stage, pieces)
        entries = [layer.entries[piece.name] for piece in pieces]
        files = [self._file_of[entry.path] for entry in entries]
        views = [_view(own, piece.weight) for own, piece in zip(entries, pieces, strict=True)]
        if layer.packed:  # else they are tensors of their own
            for name, file, piece in zip(names, files, pieces, strict=True):
                if piece.bias is not None:
                    entry = layer.entries[f"{piece.name}_bias"]
                    view = _view(entry, piece.bias)
                    self._rewrite(view, file, name.replace(".weight", ".bias"), entry.dtype)
        if kind == BF16:
            for name, file, view in zip(names, files, views, strict=True):
                self._rewrite(view, file, name, "BF16")
            return
        self.num_fp8 += 1
        places, scale_places = [], []
        for name, file, view in zip(names, files, views, strict=True):
            n, k = view.shape
            shape = {"block": block_grid(n, k), "channel": (n,), "tensor": ()}[scales]
            places.append(self._tensor(file, name, NAMES[FP8], view.shape))
            own = f"{name.removesuffix('weight')}{SCALE_NAME[scales]}"
            scale_places.append(self._tensor(file, own, "F32", shape))
        self._add(Quantize(tuple(views), scales, tuple(places), tuple(scale_places)))

    def _names(
        self, layer: ExpertLayer, expert: int, stage: str, pieces: tuple[Piece, ...]
    ) -> list[str]:
        """Return the names of matrices: packed ones get a name for each expert."""
        if not layer.packed:
            return [piece.name for piece in pieces]
        projections = _PROJECTIONS[stage][-len(pieces) :]
        return [f"{layer.prefix}.{expert}.{own}.weight" for own in projections]

    def _rewrite(self, view: View, file: int, name: str, dtype: str) -> None:
        place = self._tensor(file, name, dtype, view.shape)
        if view.is_dense and view.entry.dtype == dtype:
            self._add(Copy(view.entry.path, view.begin, view.num_bytes, place))
        else:
            self._add(Rewrite(view, dtype, place))


def _split(pieces: tuple[Piece, ...]) -> Iterator[Piece]:
    """Take interleaved gate and up apart."""
    for piece in pieces:
        if piece.rows_per_feature == 1:
            yield piece
            continue
        for first in range(2):
            bias = None if piece.bias is None else piece.bias[first::2]
            yield piece._replace(weight=piece.weight[first::2], rows_per_feature=1, bias=bias)


def _view(entry: Entry, tensor: Tensor) -> View:
    """Say where a view of a tensor without memory is in the file."""
    return View(entry, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def _position(job: Job) -> tuple[str, int]:
    if isinstance(job, Copy):
        return str(job.path), job.begin
    view = job.views[0] if isinstance(job, Quantize) else job.view
    return str(view.entry.path), view.begin
