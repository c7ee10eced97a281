"""What FP8 does to one layer: every expert and stage, over rows of tokens, without loops over them.

Errors are measured one stage at a time, the other one being in BF16, and on a token's own terms of
the layer's output, so that energies of different experts and stages may be added.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ext._activations import ACTIVATIONS, activate
from moe_ext.nn.experts import Experts
from moe_ext.precision._emulate import fp8_rows, fp8_weight, has_halves
from moe_ext.precision.layer_plan import STAGES

_SUMS = ("error", "worst", "input_max", "input_energy", "output_max")
_WEIGHTS = ("kurtosis", "max_over_rms", "weight_error", "weight_energy")


class Routed(NamedTuple):
    """Tokens of a layer and where they go."""

    hidden_states: Tensor  # (num_tokens, hidden_size) bfloat16
    topk_weights: Tensor  # (num_tokens, top_k) bfloat16 or float32
    experts: Tensor  # (num_tokens, top_k) int64: experts of the layer, num_experts for none


class Measurement:
    """Sums of one layer over all that was added."""

    def __init__(self, experts: Experts, scales: dict[str, str]) -> None:
        """Begin with nothing."""
        count = experts.num_experts
        self.experts = experts
        self.scales = scales
        self.halves = has_halves(experts.activation, experts.gate_up_layout)
        self.num_tokens = 0
        self.signal = self.signal_max = self.fp8_noise = 0.0
        self.rows = torch.zeros(count, dtype=torch.int64)
        self.output_energy = torch.zeros(count, dtype=torch.float64)
        self.sums = {name: torch.zeros(count, 2, dtype=torch.float64) for name in _SUMS}
        self.weights = {name: torch.zeros(count, 2, dtype=torch.float64) for name in _WEIGHTS}
        self.gate_up_energy = torch.zeros(count, 2, dtype=torch.float64)
        self._has_weights = False

    def add(self, parts: list[Routed]) -> None:
        """Run every expert once over the tokens of some batches."""
        experts = self.experts
        device = experts.w13.device
        hidden = torch.cat([part.hidden_states for part in parts]).to(device)
        topk_weights = torch.cat([part.topk_weights.float() for part in parts]).to(device)
        ids = torch.cat([part.experts for part in parts]).to(device)
        self.num_tokens += hidden.shape[0]
        top_k = ids.shape[1]
        ordered, slots = ids.reshape(-1).sort(stable=True)
        bounds = torch.arange(experts.num_experts + 1, device=device)
        ends = torch.searchsorted(ordered, bounds).tolist()
        output = torch.zeros(hidden.shape, dtype=torch.float32, device=device)
        noise = torch.zeros_like(output)
        for expert in range(experts.num_experts):
            own = slots[ends[expert] : ends[expert + 1]]
            if own.numel() == 0 and self._has_weights:
                continue
            w13q, w2q = self._weights_of(expert)
            if own.numel() == 0:
                continue
            tokens = own // top_k
            factors = topk_weights.reshape(-1)[own][:, None]
            y, y_fp8 = self._run(expert, hidden[tokens], factors, w13q, w2q)
            output.index_add_(0, tokens, y)
            noise.index_add_(0, tokens, y_fp8.sub_(y))
        self._has_weights = True
        self.signal += energy(output)
        self.fp8_noise += energy(noise)
        self.signal_max = max(self.signal_max, largest(output))

    def look_at_weights(self) -> None:
        """See to what is known without tokens, where none came."""
        if not self._has_weights:
            for expert in range(self.experts.num_experts):
                self._weights_of(expert)
            self._has_weights = True

    def _weights_of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return both weights as FP8 has them; the first time, look at them too."""
        dense = []
        for index, (stage, weight) in enumerate(
            zip(STAGES, (self.experts.w13, self.experts.w2), strict=True)
        ):
            w = weight[expert].float()
            q = fp8_weight(w, self.scales[stage], self.halves and index == 0)
            dense.append(q)
            if not self._has_weights:
                self._look_at(expert, index, w, q)
        return dense[0], dense[1]

    def _look_at(self, expert: int, index: int, w: Tensor, q: Tensor) -> None:
        total = energy(w)
        place = (expert, index)
        self.weights["weight_energy"][place] = total
        self.weights["weight_error"][place] = energy(q - w) / total if total else 0.0
        self.weights["kurtosis"][place] = _kurtosis(w)
        rms = (total / w.numel()) ** 0.5
        self.weights["max_over_rms"][place] = largest(w) / rms if rms else 0.0
        if index == 0 and ACTIVATIONS[self.experts.activation].gated:
            gate, up = w.chunk(2) if self.halves else (w[0::2], w[1::2])
            self.gate_up_energy[expert, 0] = energy(gate)
            self.gate_up_energy[expert, 1] = energy(up)

    def _run(
        self, expert: int, rows: Tensor, factors: Tensor, w13q: Tensor, w2q: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the terms of the layer's output of one expert's rows: in BF16, and all in FP8."""
        experts = self.experts
        w2 = experts.w2[expert].float()
        if experts.apply_router_weight_on_input:
            rows = (rows.float() * factors).bfloat16()
            factors = torch.ones_like(factors)
        factors = factors * experts.routed_scale
        x = rows.float()
        gate_up = self._first(expert, x, experts.w13[expert].float())
        middle = self._activate(gate_up)
        y = self._second(expert, middle, w2)
        middle_q = self._activate(self._first(expert, fp8_rows(rows, self.scales["gate_up"]), w13q))
        down = self.scales["down"]
        y_down = self._second(expert, fp8_rows(middle, down), w2q)
        y_both = self._second(expert, fp8_rows(middle_q, down), w2q)
        changes = ((middle_q - middle) @ w2.T, y_down - y)
        terms = y * factors
        self.rows[expert] += rows.shape[0]
        self.output_energy[expert] += energy(terms)
        for index, (change, before, after) in enumerate(
            zip(changes, (x, middle), (gate_up, y), strict=True)
        ):
            change *= factors
            place = (expert, index)
            self.sums["error"][place] += energy(change)
            self.sums["input_energy"][place] += energy(before)
            for name, tensor in (
                ("worst", change),
                ("input_max", before),
                ("output_max", after),
            ):
                self.sums[name][place] = max(float(self.sums[name][place]), largest(tensor))
        return terms, y_both * factors

    def _first(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        bias = self.experts.w13_bias
        product = x @ weight.T
        return product if bias is None else product + bias[expert].float()

    def _second(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        bias = self.experts.w2_bias
        product = x @ weight.T
        return product if bias is None else product + bias[expert].float()

    def _activate(self, gate_up: Tensor) -> Tensor:
        experts = self.experts
        middle = activate(
            gate_up,
            experts.activation,
            alpha=experts.alpha,
            limit=experts.limit,
            gate_up_layout=experts.gate_up_layout,
        )
        # Rounded as `fused_moe` rounds the intermediate.
        return middle.bfloat16().float()


def energy(tensor: Tensor) -> float:
    """Return the sum of squares, in float64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def largest(tensor: Tensor) -> float:
    """Return the largest magnitude; NaN where there is one."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _kurtosis(w: Tensor) -> float:
    """Return the fourth central moment over the square of the second, 0 where all are equal."""
    most = largest(w)
    if not most:
        return 0.0
    # Of values within -1 and 1, whose powers do not overflow.
    scaled = w / most
    centred = scaled.sub_(float(scaled.mean(dtype=torch.float64)))
    squares = centred.square_()
    variance = float(squares.mean(dtype=torch.float64))
    fourth = float(squares.square_().mean(dtype=torch.float64))
    return fourth / variance**2 if variance > 0 else 0.0
