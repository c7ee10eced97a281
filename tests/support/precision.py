"""Statistics of layers with given errors."""

from __future__ import annotations

import torch
from moe_ext.precision import LayerStats


def layer_stats(errors, **changes):
    """Statistics of a layer with such errors, a pair for each expert."""
    error = torch.tensor(errors, dtype=torch.float64).reshape(-1, 2)
    count = error.shape[0]
    zeros = {name: torch.zeros(count, 2) for name in ("input_max", "input_rms", "output_max")}
    zeros |= {
        name: torch.zeros(count, 2, dtype=torch.float64)
        for name in ("worst", "kurtosis", "max_over_rms", "weight_error")
    }
    values = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "gated": True,
        "halves": True,
        "gate_up_scales": "block",
        "down_scales": "block",
        "num_tokens": 100,
        "min_rows": 32,
        "signal": 1e6,
        "signal_max": 3.0,
        "fp8_noise": float(error.sum()),
        "model_signal": None,
        "model_noise": None,
        "rows": torch.full((count,), 50),
        "from_weights": torch.zeros(count, dtype=torch.bool),
        "error": error,
    }
    return LayerStats(**(values | zeros | changes))
