"""What calibration finds out: `PrecisionStats`, a `LayerStats` for each layer, and their files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ext.nn._arguments import shown
from moe_ext.nn._pieces import quoted
from moe_ext.precision._files import load_tensors, save_tensors
from moe_ext.precision.layer_plan import STAGES

FORMAT = "moe_ext.precision_stats"
VERSION = 1
_OP = "PrecisionStats"


@dataclass(frozen=True, eq=False)
class LayerStats:
    """Of one layer's experts; energies are sums of squares over all tokens and channels.

    Tensors with two columns have the stages gate_up and down in them. All are on the CPU.

    Attributes:
        hidden_size: of the layer.
        intermediate_size: of the layer.
        gated: whether the first GEMM has gate and up.
        halves: whether gate rows and up rows have blocks of their own.
        gate_up_scales: the layout of FP8 weights that was judged: "block", "channel" or "tensor".
        down_scales: the same of the second GEMM.
        num_tokens: how many tokens there were.
        min_rows: from how many rows on an expert is judged by what they show.
        signal: energy of the layer's output in BF16, without a shared expert; where no token
            reached the layer, what its weights promise for `min_rows` rows an expert.
        signal_max: largest magnitude of an element of it.
        fp8_noise: energy of what FP8 in all stages of all experts changes in it, measured.
        model_signal: energy of the model's output; None where no model was given.
        model_noise: energy of what FP8 in this layer alone changes in it; None likewise.
        rows: (num_experts,) int64, how many of the tokens' choices an expert had.
        from_weights: (num_experts,) bool, whether `error` is judged from weights alone.
        error: (num_experts, 2) float64, energy that FP8 in this stage alone adds to the layer's
            output. Estimated where `from_weights`, see docs/precision.md.
        worst: (num_experts, 2) float64, largest magnitude among the elements of what it adds; 0
            for an expert without a row.
        input_max: (num_experts, 2) float32, largest magnitude of a stage's input; 0 likewise.
        input_rms: (num_experts, 2) float32, root mean square of a stage's input; 0 likewise.
        output_max: (num_experts, 2) float32, largest magnitude of a stage's product; 0 likewise.
        kurtosis: (num_experts, 2) float64, of the stage's weights; 3 for normal ones.
        max_over_rms: (num_experts, 2) float64, largest weight over root mean square.
        weight_error: (num_experts, 2) float64, energy of what FP8 changes in the weights, over
            that of the weights.
    """

    hidden_size: int
    intermediate_size: int
    gated: bool
    halves: bool
    gate_up_scales: str
    down_scales: str
    num_tokens: int
    min_rows: int
    signal: float
    signal_max: float
    fp8_noise: float
    model_signal: float | None
    model_noise: float | None
    rows: Tensor
    from_weights: Tensor
    error: Tensor
    worst: Tensor
    input_max: Tensor
    input_rms: Tensor
    output_max: Tensor
    kurtosis: Tensor
    max_over_rms: Tensor
    weight_error: Tensor

    @property
    def num_experts(self) -> int:
        """How many experts the layer has."""
        return self.rows.shape[0]

    @property
    def snr_db(self) -> Tensor:
        """(num_experts, 2): the layer's output over what FP8 in one stage adds to it, in dB."""
        return 10 * (self.signal / self.error).log10()

    @property
    def fp8_snr_db(self) -> float:
        """The layer's output over what FP8 in all stages adds to it, in dB, measured."""
        return 10 * math.log10(self.signal / self.fp8_noise) if self.fp8_noise else math.inf

    @property
    def predicted_snr_db(self) -> float:
        """The same as the sum of all errors says it, which takes them for independent."""
        total = float(self.error[~self.from_weights].sum())
        return 10 * math.log10(self.signal / total) if total else math.inf


SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "rows": ((), torch.int64),
    "from_weights": ((), torch.bool),
    "error": ((2,), torch.float64),
    "worst": ((2,), torch.float64),
    "input_max": ((2,), torch.float32),
    "input_rms": ((2,), torch.float32),
    "output_max": ((2,), torch.float32),
    "kurtosis": ((2,), torch.float64),
    "max_over_rms": ((2,), torch.float64),
    "weight_error": ((2,), torch.float64),
}
NUMBERS = tuple(field.name for field in fields(LayerStats) if field.name not in SHAPES)


@dataclass(frozen=True, eq=False)
class PrecisionStats:
    """Statistics of a model's layers, by name and in order: what `moe_ext.calibrate` returns.

    Attributes:
        layers: of each layer with experts.

    Notes:
        `save` and `load` use the package `safetensors`: pip install "moe-ext[precision]".
    """

    layers: Mapping[str, LayerStats]

    def model_share(self, layer: str) -> Tensor | None:
        """Return each stage's share of the error that FP8 makes in the model's output.

        Args:
            layer: its name.

        Returns:
            (num_experts, 2) float64; all layers together have the sum 1, as layers and stages are
            taken for independent. None where no model was given.
        """
        noises = [stats.model_noise for stats in self.layers.values()]
        own = self.layers[layer]
        if own.model_noise is None or any(noise is None for noise in noises):
            return None
        total = math.fsum(noise for noise in noises if noise is not None)
        whole = float(own.error.sum())
        if not total or not whole:
            return torch.zeros_like(own.error)
        return own.error * (own.model_noise / (total * whole))

    def save(self, path: str | Path) -> None:
        """Write everything to a safetensors file, which appears when it is complete."""
        tensors = {
            f"{index}.{name}": getattr(stats, name)
            for index, stats in enumerate(self.layers.values())
            for name in SHAPES
        }
        layers = {
            name: {number: getattr(stats, number) for number in NUMBERS}
            for name, stats in self.layers.items()
        }
        header = {"format": FORMAT, "version": VERSION, "stages": STAGES, "layers": layers}
        save_tensors(f"{_OP}.save", path, tensors, header)

    @classmethod
    def load(cls, path: str | Path) -> PrecisionStats:
        """Read what `save` wrote.

        Raises:
            ValueError: the file holds no statistics, or those of a later version; or a part is
                missing, of another shape, or has values that statistics cannot have.
            OSError: it cannot be read.
        """
        from moe_ext.precision._stats_checks import check_layer_stats

        op = f"{_OP}.load"
        tensors, header = load_tensors(op, path, FORMAT, VERSION)
        found = header.get("layers")
        if not isinstance(found, dict) or not found:
            got = "an empty one" if found == {} else shown(found)
            raise ValueError(
                f"{op}: `layers` must be an object with statistics of layers, got {got}"
            )
        layers = {}
        for index, (name, numbers) in enumerate(found.items()):
            parts: dict[str, Any] = {p: tensors.pop(f"{index}.{p}", None) for p in SHAPES}
            check_layer_stats(op, f"layers[{quoted(name)}]", numbers, parts)
            layers[name] = LayerStats(**numbers, **parts)
        if tensors:
            raise ValueError(f"{op}: the file must hold nothing else, got {shown(sorted(tensors))}")
        return cls(layers)
