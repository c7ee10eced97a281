"""`moe_ext.explain_fused_moe`: the kernels that a layer would run, why, and what it should cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from moe_ext._configs import all_configs, planner
from moe_ext._dispatch import (
    DENSE_FLOPS_PER_US,
    ITEM_BYTES,
    LAUNCH_US,
    READ_BYTES_PER_US,
    Problem,
    predict_us,
)
from moe_ext._explain import aligned, ends_of, gpu_of, lines_of, of_rows, said_times
from moe_ext._fused_moe_kernels import decide_kernels
from moe_ext._measure import layer_call, median_us, num_copies
from moe_ext._problem_parts import check_parts
from moe_ext._problems import AskedLayer, asked_fused_moe, layer_scales


@dataclasses.dataclass(frozen=True)
class StageExplanation:
    """One GEMM of a layer.

    Attributes:
        config: id of its kernel.
        config_index: its index.
        n: rows of an expert's matrix: of gate and up, or the hidden size.
        k: summed dimension.
        num_tiles: output tiles, each computed by one CTA.
        waves: num_tiles over the CTAs that run at the same time.
        padded_rows: rows computed beyond the real ones, because tiles have fixed widths.
        token_widths: token tile widths in use, ascending.
        weight_bytes: bytes of the active experts' weights.
        predicted_us: the cost model's estimate.
    """

    config: str
    config_index: int
    n: int
    k: int
    num_tiles: int
    waves: float
    padded_rows: int
    token_widths: tuple[int, ...]
    weight_bytes: int
    predicted_us: float

    def describe(self) -> str:
        """Say tiles and weights."""
        widths = ", ".join(map(str, self.token_widths)) or "none"
        return (
            f"n {self.n}, k {self.k}: {self.num_tiles} tiles, {self.waves:.2f} waves, token tiles "
            f"of {widths}, {self.padded_rows} rows of padding, {self.weight_bytes / 2**20:.1f} MiB"
        )


@dataclasses.dataclass(frozen=True)
class LayerExplanation:
    """The choice for one layer; `print` it, or read the fields.

    Attributes:
        dtype: "bf16" or "fp8" weights.
        num_tokens: tokens of a call.
        top_k: experts of a token.
        num_experts: experts of the layer.
        sm_count: streaming multiprocessors of the GPU.
        source: "table" (a measured choice), "likeness" (the kernel most like a measured one of the
            product alone) or "cost model".
        reason: what was measured or estimated.
        gate_up: the first GEMM.
        down: the second GEMM.
        active_experts: experts with at least one row.
        largest_expert: rows of the expert with most.
        floor_us: the least both GEMMs can take on an H200: weights read once, or the dense rate,
            plus 2 us.
        predicted_us: the cost model's estimate of both GEMMs; sorting, quantising and combining are
            not in it.
        measured_us: the median time of the whole layer on the GPU that was asked for, None where
            none was.
    """

    dtype: str
    num_tokens: int
    top_k: int
    num_experts: int
    sm_count: int
    source: str
    reason: str
    gate_up: StageExplanation
    down: StageExplanation
    active_experts: int
    largest_expert: int
    floor_us: float
    predicted_us: float
    measured_us: float | None = None

    def __str__(self) -> str:
        """Lay the choice out in a few aligned lines."""
        stages = (("gate/up", self.gate_up), ("down", self.down))
        return aligned(
            [
                (
                    "problem",
                    f"layer in {self.dtype}, {self.num_tokens} tokens with {self.top_k} of "
                    f"{self.num_experts} experts",
                ),
                *(
                    line
                    for label, stage in stages
                    for line in (
                        (label, f"{stage.config} (index {stage.config_index})"),
                        ("", stage.describe()),
                    )
                ),
                *lines_of("why", f"{self.source}: {self.reason}"),
                (
                    "work",
                    f"{self.active_experts} experts with rows, the largest {self.largest_expert}; "
                    f"{self.sm_count} SMs",
                ),
                (
                    "time",
                    said_times(self.floor_us, self.predicted_us, self.measured_us)
                    + of_rows(self.active_experts, self.num_experts, "experts"),
                ),
            ]
        )


def explain_fused_moe(
    *,
    offs: Sequence[int] | None = None,
    sm_count: int | None = None,
    measure_on: torch.device | str | int | None = None,
    **problem: Any,
) -> LayerExplanation:
    """Say which compiled kernels `fused_moe` would run, why, and what it should cost.

    Args:
        offs: end row of each expert, host numbers. None spreads the rows evenly. They change the
            tiles and times that are told, not the choice: the dispatcher never sees them.
        sm_count: streaming multiprocessors of the GPU. None is 132, an H200's, or what
            `measure_on` has.
        measure_on: a CUDA device or its index to time the whole layer on: random data, weights out
            of the L2 cache, a CUDA graph, the median of 20 replays. None measures nothing.
        **problem: dtype of the weights, num_tokens, top_k, hidden_size, intermediate_size,
            num_experts, and options of the op, as `supports("fused_moe", ...)` takes them.

    Returns:
        A `LayerExplanation`.

    Raises:
        ValueError: the problem is none; the message is the op's. Or there is nothing to measure.
        TypeError: something of the problem is missing, is not a part of it, or has a value of
            another kind.
        RuntimeError: `measure_on` is given and the kernels cannot run there, as the ops say it.

    Notes:
        Tensors are taken as contiguous, as `supports` takes them: sizes whose rows begin at
        multiples of 16 bytes only after `pad_rows` are refused.
        Host only but with `measure_on`, which allocates 2 to 64 copies of the weights, as many as
        it takes for those that a call reads to exceed L2 four times, and synchronises.

    Example:
        >>> sizes = {"hidden_size": 2048, "intermediate_size": 768, "num_experts": 128}
        >>> told = explain_fused_moe(dtype="bf16", num_tokens=16, top_k=8, **sizes)
        >>> told.gate_up.n, told.down.n, told.active_experts
        (1536, 2048, 128)
    """
    op = "explain_fused_moe"
    check_parts(op, "fused_moe", problem)
    device, sms = gpu_of(op, measure_on, sm_count)
    try:
        asked = asked_fused_moe(**problem)
    except ValueError as error:
        raise ValueError(str(error).replace("supports: ", f"{op}: ", 1)) from None
    layer = asked.layer
    num_rows = layer.num_tokens * layer.top_k
    ends = ends_of(op, offs, num_rows, layer.num_experts)
    rows = [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    decision = decide_kernels(*asked, sms)
    active = sum(1 for count in rows if count)
    w13_rows = layer.intermediate_size * (2 if layer.gated else 1)
    shapes = ((w13_rows, layer.hidden_size), (layer.hidden_size, layer.intermediate_size))
    # Where there is no up, tiles are as if there were: half of their rows are loaded twice.
    tiled = (2 * layer.intermediate_size, layer.hidden_size)
    gate_up, down = (
        _explain_stage(asked, index, ends, shape, tiled_n, active, sms)
        for index, shape, tiled_n in zip(decision.kernels, shapes, tiled, strict=True)
    )
    dtype = "fp8" if layer.fp8 else "bf16"
    work = 2 * ends[-1] * sum(n * k for n, k in shapes) / DENSE_FLOPS_PER_US[dtype]
    weight_bytes = gate_up.weight_bytes + down.weight_bytes
    told = LayerExplanation(
        dtype=dtype,
        num_tokens=layer.num_tokens,
        top_k=layer.top_k,
        num_experts=layer.num_experts,
        sm_count=sms,
        source=decision.source,
        reason=decision.reason,
        gate_up=gate_up,
        down=down,
        active_experts=active,
        largest_expert=max(rows),
        floor_us=max(weight_bytes / READ_BYTES_PER_US, work) + LAUNCH_US,
        predicted_us=gate_up.predicted_us + down.predicted_us,
    )
    if device is None:
        return told
    if ends[-1] != num_rows or not num_rows:
        raise ValueError(
            f"{op}: `offs` must end at num_tokens * top_k = {num_rows}, and not at 0, to measure, "
            f"got {ends[-1]}"
        )
    copies = num_copies(weight_bytes)
    call = layer_call(
        dtype=dtype,
        rows_of_experts=rows,
        top_k=layer.top_k,
        hidden_size=layer.hidden_size,
        w13_rows=w13_rows,
        intermediate_size=layer.intermediate_size,
        copies=copies,
        device=torch.device("cuda", device),
        options=tensor_options(problem, asked, w13_rows, torch.device("cuda", device)),
    )
    measured = median_us(op, device, call, copies, told.predicted_us)
    return dataclasses.replace(told, measured_us=measured)


def _explain_stage(
    asked: AskedLayer,
    index: int,
    ends: list[int],
    shape: tuple[int, int],
    tiled_n: int,
    active: int,
    sm_count: int,
) -> StageExplanation:
    config, (n, k) = all_configs()[index], shape
    dtype = "fp8" if asked.layer.fp8 else "bf16"
    plan = planner().plan(ends, ends[-1], tiled_n, index, sm_count)
    num_experts = asked.layer.num_experts
    problem = Problem(dtype, config.accumulate, ends[-1], num_experts, n, k, sm_count)
    return StageExplanation(
        config=config.id,
        config_index=index,
        n=n,
        k=k,
        num_tiles=plan["num_tiles"],
        waves=plan["waves"],
        padded_rows=plan["padded_rows"],
        token_widths=tuple(sorted({width for width in plan["token_widths"] if width})),
        weight_bytes=active * n * k * ITEM_BYTES[dtype],
        predicted_us=predict_us(config, problem, active),
    )


_SIZES = (
    *("dtype", "num_tokens", "top_k", "hidden_size", "intermediate_size", "num_experts"),
    *("w13_scale", "w2_scale"),
)


def tensor_options(
    problem: dict[str, Any], asked: AskedLayer, w13_rows: int, device: torch.device
) -> dict[str, Any]:
    """Return the options of a call of the op, with tensors of ones where forms were given."""
    layer = asked.layer
    options = {name: value for name, value in problem.items() if name not in _SIZES}
    sizes = (layer.num_experts, w13_rows, layer.hidden_size, layer.intermediate_size)
    forms = (problem.get("w13_scale"), problem.get("w2_scale"))
    options |= {
        name: None if scale is None else torch.ones(scale.shape, device=device)
        for name, scale in layer_scales(*sizes, *forms).items()
    }
    shapes: dict[str, tuple[int, ...]] = {
        "a1_scale": (),
        "a2_scale": (),
        "w13_bias": (layer.num_experts, w13_rows),
        "w2_bias": (layer.num_experts, layer.hidden_size),
        "addend": (layer.num_tokens, layer.hidden_size),
    }
    for name, shape in shapes.items():
        if name in options:
            given = options[name]
            options[name] = torch.ones(shape, device=device) if given else None
    return options
