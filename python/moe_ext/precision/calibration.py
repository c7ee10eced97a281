"""`calibrate`: what FP8 does to every expert and stage of a layer or model, on given tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext.nn._arguments import check_tensor, is_int, shown
from moe_ext.nn._pieces import LAYOUTS, quoted
from moe_ext.nn.experts import Experts
from moe_ext.nn.moe_layer import MoELayer
from moe_ext.precision._capture import (
    capture,
    first_not_finite,
    layers_of,
    output_of,
    replaced,
    run,
)
from moe_ext.precision._judge import judge, promised_signal
from moe_ext.precision._measure import Measurement, Routed, energy
from moe_ext.precision.bank import ExpertBank
from moe_ext.precision.layer_plan import STAGES, LayerPlan, StagePlan
from moe_ext.precision.stats import LayerStats, PrecisionStats

_OP = "calibrate"
_HELD_BYTES = 1 << 30
"""Tokens that may wait for the experts: each expert is quantised once for all that wait."""


@torch.no_grad()
def calibrate(
    model_or_layer: nn.Module,
    batches: Iterable[Any],
    *,
    scales: str | Mapping[str, str] = "block",
    min_rows: int = 32,
    measure_model: bool | None = None,
    model_output: Callable[[Any], Tensor] | None = None,
) -> PrecisionStats:
    """Measure the error that FP8 adds to a layer's output, for each expert and stage apart.

    Args:
        model_or_layer: `moe_ext.nn.Experts` in bfloat16, a `MoELayer` of such, or any module that
            holds some.
        batches: what to call it with, each a tensor, a tuple of arguments or a mapping of named
            ones: for `Experts` (hidden_states, topk_weights, topk_ids), for a `MoELayer` hidden
            states, for a model what it takes. Read once; again for a model's output, so kept.
        scales: the layout of FP8 weights to judge, "block", "channel" or "tensor", or one for each
            of "gate_up" and "down".
        min_rows: experts with fewer rows are judged from their weights alone, and marked so.
        measure_model: whether to measure too what FP8 in each layer does to the model's output,
            which runs the model once more for each layer and batch. None is for models, not for
            `Experts` or a `MoELayer`.
        model_output: from a model's result to the tensor that counts. None is the result itself if
            that is a tensor, its `logits`, or its first element.

    Returns:
        The statistics of each layer under its name in the model; `Experts` alone are "experts". A
        layer that no token reached is judged from its weights alone, all experts of it.

    Raises:
        ValueError: an argument differs from the above, no token reached any layer, or an input or
            output of a layer is not finite.

    Notes:
        A stage's error is that of its FP8 weights and activations, the other stage being BF16; its
        energy is summed over the terms that the expert's rows add to the layer's output. Runs on
        the device of the weights in float32; on the CPU and on CUDA without the kernels, except
        for what the model itself does and `measure_model`. Needs memory for the tokens, at most
        1 GiB and one batch before they are used.

    Example:
        >>> from moe_ext.precision import realistic_layer
        >>> layer = realistic_layer(16, 64, 32, top_k=4, super_experts=1)
        >>> stats = calibrate(layer.experts(), [tuple(layer.tokens(256))])
        >>> of_down = stats.layers["experts"].error[:, 1]
        >>> int(of_down.argmax()) == layer.super_experts[0]
        True
    """
    layouts = layouts_of(scales)
    if not isinstance(model_or_layer, nn.Module):
        raise ValueError(
            f"{_OP}: `model_or_layer` must be an nn.Module, got {shown(model_or_layer)}"
        )
    if not is_int(min_rows) or min_rows < 1:
        raise ValueError(f"{_OP}: `min_rows` must be an int of at least 1, got {shown(min_rows)}")
    layers = layers_of(model_or_layer)
    measured = {name: Measurement(experts, layouts) for name, experts in layers.items()}
    of_model = measure_model
    if of_model is None:
        of_model = not isinstance(model_or_layer, (Experts, MoELayer))
    kept: list[Any] = []
    waiting: dict[str, list[Routed]] = {name: [] for name in layers}
    wrong: dict[str, str] = {}
    held = 0
    for number, batch in enumerate(batches):
        if of_model:
            kept.append(batch)
        for name, calls in capture(model_or_layer, layers, batch).items():
            waiting[name] += calls
            for call in calls if name not in wrong else ():
                if found := first_not_finite(call, layers[name].num_experts):
                    inputs = f"the {found.part} of {quoted(name)}"
                    wrong[name] = found.describe(inputs, f" of batch {number}, counted from 0")
            held += sum(call.hidden_states.nbytes for call in calls)
        if held > _HELD_BYTES:
            _flush(measured, waiting)
            held = 0
    _flush(measured, waiting)
    if not any(bool(own.rows.any()) for own in measured.values()):
        raise ValueError(
            f"{_OP}: `batches` must hold tokens that reach {', '.join(map(quoted, layers))}, got "
            "none"
        )
    for name, own in measured.items() if wrong else ():
        if name in wrong:
            raise ValueError(f"{_OP}: {wrong[name]}")
        stats_of(name, own, min_rows)  # raises where inputs behind are so by this layer's output
    signal, noises = None, dict[str, float | None].fromkeys(layers)
    if of_model:
        output = output_of if model_output is None else model_output
        signal, noises = _model_errors(model_or_layer, layers, kept, layouts, output)
    return PrecisionStats(
        {
            name: stats_of(name, own, min_rows, signal, noises[name])
            for name, own in measured.items()
        }
    )


def layouts_of(scales: Any) -> dict[str, str]:
    """Return the layout of scales of each stage, from the argument of `calibrate`."""
    layouts = dict.fromkeys(STAGES, scales) if isinstance(scales, str) else scales
    if (
        not isinstance(layouts, Mapping)
        or set(layouts) != set(STAGES)
        or not all(isinstance(own, str) and own in LAYOUTS for own in layouts.values())
    ):
        raise ValueError(
            f"{_OP}: `scales` must be one of {', '.join(map(quoted, LAYOUTS))}, or one for each of "
            f'"gate_up" and "down", got {scales!r}'
        )
    return dict(layouts)


def _flush(measured: dict[str, Measurement], waiting: dict[str, list[Routed]]) -> None:
    for name, parts in waiting.items():
        if parts:
            measured[name].add(parts)
            parts.clear()


def _model_errors(
    model: nn.Module,
    layers: dict[str, Experts],
    batches: list[Any],
    layouts: dict[str, str],
    output: Callable[[Any], Tensor],
) -> tuple[float, dict[str, float | None]]:
    """Return the energy of the model's output, and of what each layer's FP8 changes in it."""

    def outcome(batch: Any) -> Tensor:
        value = output(run(model, batch))
        check_tensor(_OP, "model_output", value)
        return value

    results = [outcome(batch) for batch in batches]
    noises: dict[str, float | None] = {}
    for name, experts in layers.items():
        stages = {stage: StagePlan(layouts[stage]) for stage in STAGES}
        bank = ExpertBank.from_experts(LayerPlan(experts.num_experts, **stages), bf16=experts)
        with replaced(experts, bank):
            noises[name] = sum(
                energy(outcome(batch).float() - result.float())
                for batch, result in zip(batches, results, strict=True)
            )
    return sum(energy(result.float()) for result in results), noises


def stats_of(
    name: str,
    own: Measurement,
    min_rows: int,
    signal: float | None = None,
    noise: float | None = None,
) -> LayerStats:
    """Return the statistics of a layer.

    Args:
        name: of the layer, in messages.
        own: what was measured.
        min_rows: see `calibrate`.
        signal: energy of the model's output; None where no model was measured.
        noise: energy of what FP8 in this layer changes in it; None likewise.
    """
    experts = own.experts
    own.look_at_weights()
    error, from_weights = judge(own, min_rows)
    finite = error.isfinite()
    if not bool(finite.all()):
        expert, index = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f'{_OP}: the output of "{name}" must be finite, got {float(error[expert, index])} for '
            f"what FP8 changes in stage {quoted(STAGES[index])} of expert {expert}"
        )
    count = own.rows.clamp_min(1)[:, None] * torch.tensor(
        [experts.hidden_size, experts.intermediate_size]
    )
    return LayerStats(
        hidden_size=experts.hidden_size,
        intermediate_size=experts.intermediate_size,
        gated=experts.w13.shape[1] != experts.intermediate_size,
        halves=own.halves,
        gate_up_scales=own.scales["gate_up"],
        down_scales=own.scales["down"],
        num_tokens=own.num_tokens,
        min_rows=min_rows,
        # As errors from weights alone are, so that they can be set against it.
        signal=own.signal if bool(own.rows.any()) else promised_signal(own, min_rows),
        signal_max=own.signal_max,
        fp8_noise=own.fp8_noise,
        model_signal=signal,
        model_noise=noise,
        rows=own.rows,
        from_weights=from_weights,
        error=error,
        worst=own.sums["worst"],
        input_max=own.sums["input_max"].float(),
        input_rms=(own.sums["input_energy"] / count).sqrt().float(),
        output_max=own.sums["output_max"].float(),
        kurtosis=own.weights["kurtosis"],
        max_over_rms=own.weights["max_over_rms"],
        weight_error=own.weights["weight_error"],
    )
