"""A layer as trained models have it, made of seeds: uneven channels, super experts, uneven routing.

What is planted, and where it was reported:

- Channels have log-normal scales: of the hidden states, as activations differ by channel and
  keep doing so over tokens (SmoothQuant, arxiv.org/abs/2211.10438), and of the rows of all weights.
- A few super experts have rows of `down_proj` that are 1e3 times as large: experts whose
  down projection puts extreme values into a few channels of the hidden state, where they stay
  ("Unveiling Super Experts in Mixture-of-Experts Large Language Models", arxiv.org/abs/2507.23279:
  3 of the 6,144 experts of Qwen3-30B-A3B; "Massive Activations in Large Language Models",
  arxiv.org/abs/2402.17762: few channels, the same ones for all tokens, up to 1e5 times the median).
- In these experts one intermediate feature spikes, its gate and up rows being 16 times as large: in
  dense models such values are made by a large product of gate and up that meets large weights of
  `down_proj` ("The Super Weight in Large Language Models", arxiv.org/abs/2411.07191).
- Popularity of experts follows Zipf's law with the exponent 0.6 in a random order, and a token
  draws its experts without replacement (Gumbel top-k, arxiv.org/abs/1903.06059): the rule of
  bench/data/routing.py, from another stream of random numbers.

The exponent 0.6, the deviation 0.5 of the log-normal scales, the number of large rows and the
factor of the spike are choices of this module, not measurements of a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ext.nn._arguments import is_int, shown
from moe_ext.nn.experts import Experts
from moe_ext.precision.layer_plan import STAGES

_OP = "realistic_layer"


class Tokens(NamedTuple):
    """What a layer's experts are called with."""

    hidden_states: Tensor  # (num_tokens, hidden_size) bfloat16
    topk_weights: Tensor  # (num_tokens, top_k) float32, rows sum to 1
    topk_ids: Tensor  # (num_tokens, top_k) int64, no expert twice


@dataclass(frozen=True, eq=False)
class RealisticLayer:
    """Weights of SwiGLU experts in BF16, and how their tokens are drawn."""

    w13: Tensor  # (num_experts, 2 * intermediate_size, hidden_size) bfloat16
    w2: Tensor  # (num_experts, hidden_size, intermediate_size) bfloat16
    super_experts: tuple[int, ...]  # ascending
    log_popularity: Tensor  # (num_experts,) float32
    hidden_scales: Tensor  # (hidden_size,) float32
    top_k: int
    planted: tuple[tuple[int, str], ...]  # (expert, stage), what must not be in FP8

    def experts(self, **options: Any) -> Experts:
        """Return the experts as a module, which shares the weights."""
        tensors = {"gate_up_proj": self.w13, "down_proj": self.w2}
        return Experts.from_state_dict(tensors, **options)

    def tokens(self, num_tokens: int, seed: int = 0) -> Tokens:
        """Draw tokens and their experts; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        hidden_size, num_experts = self.w2.shape[1], self.w2.shape[0]
        x = torch.randn(num_tokens, hidden_size, generator=generator) * self.hidden_scales
        race = torch.empty(num_tokens, num_experts).exponential_(generator=generator)
        # Exponential races are the Gumbel trick: -log(E / p) = log p + Gumbel.
        noisy, ids = (self.log_popularity - race.log()).topk(self.top_k, dim=1)
        return Tokens(x.bfloat16(), noisy.softmax(dim=1), ids)


def realistic_layer(
    num_experts: int = 128,
    hidden_size: int = 2048,
    intermediate_size: int = 768,
    *,
    top_k: int = 8,
    seed: int = 0,
    super_experts: int = 3,
    outlier_channels: int = 4,
    outlier_factor: float = 1e3,
    spike_features: int = 1,
    spike_factor: float = 16.0,
    log_deviation: float = 0.5,
    zipf: float = 0.6,
) -> RealisticLayer:
    """Make a layer of Qwen3-30B-A3B's sizes, or others, with super experts planted.

    Args:
        num_experts: of the layer.
        hidden_size: columns of hidden states.
        intermediate_size: of one expert.
        top_k: experts of a token.
        seed: fixes weights, scales, popularity and which experts are super.
        super_experts: how many.
        outlier_channels: rows of their `down_proj` that are `outlier_factor` times as large, the
            same rows in all of them.
        outlier_factor: see there.
        spike_features: of their intermediate, whose gate and up rows are `spike_factor` times as
            large.
        spike_factor: see there.
        log_deviation: standard deviation of the logarithm of a channel's scale.
        zipf: exponent of the popularity of experts; 0 is the same for all.

    Returns:
        The layer. Without spikes gate and up of an expert are of the size of 1, and so are its
        results but for the scales of rows.

    Raises:
        ValueError: an argument differs from the above.

    Example:
        >>> layer = realistic_layer(8, 64, 32, top_k=2, super_experts=1)
        >>> layer.planted == tuple((layer.super_experts[0], stage) for stage in ("gate_up", "down"))
        True
    """
    _check_counts(
        num_experts=(num_experts, 1, 4096),
        hidden_size=(hidden_size, 1, None),
        intermediate_size=(intermediate_size, 1, None),
        top_k=(top_k, 1, num_experts),
        super_experts=(super_experts, 0, num_experts),
        outlier_channels=(outlier_channels, 0, hidden_size),
        spike_features=(spike_features, 0, intermediate_size),
    )
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def scales(*shape: int) -> Tensor:
        return (log_deviation * normal(*shape)).exp()

    def some(total: int, count: int) -> Tensor:
        return torch.randperm(total, generator=generator)[:count].sort().values

    hidden_scales = scales(hidden_size)
    rank = torch.randperm(num_experts, generator=generator).float() + 1
    chosen = tuple(some(num_experts, super_experts).tolist())
    outliers = some(hidden_size, outlier_channels)
    w13 = torch.empty(num_experts, 2 * intermediate_size, hidden_size, dtype=torch.bfloat16)
    w2 = torch.empty(num_experts, hidden_size, intermediate_size, dtype=torch.bfloat16)
    for expert in range(num_experts):
        first = normal(*w13.shape[1:]) * scales(2 * intermediate_size, 1)
        down = normal(*w2.shape[1:]) * scales(hidden_size, 1)
        if expert in chosen:
            features = some(intermediate_size, spike_features)
            first[features] *= spike_factor
            first[features + intermediate_size] *= spike_factor
            down[outliers] *= outlier_factor
        w13[expert] = first / hidden_scales.norm()
        w2[expert] = down / math.sqrt(intermediate_size)
    planted = {
        "gate_up": spike_features > 0 and spike_factor != 1,
        "down": outlier_channels > 0 and outlier_factor != 1,
    }
    return RealisticLayer(
        w13,
        w2,
        chosen,
        -zipf * rank.log(),
        hidden_scales,
        top_k,
        tuple((expert, stage) for expert in chosen for stage in STAGES if planted[stage]),
    )


def _check_counts(**counts: tuple[Any, int, int | None]) -> None:
    for name, (value, least, most) in counts.items():
        if not is_int(value) or value < least or (most is not None and value > most):
            limit = f"{least} or more" if most is None else f"from {least} to {most}"
            raise ValueError(f"{_OP}: `{name}` must be an int {limit}, got {shown(value)}")
