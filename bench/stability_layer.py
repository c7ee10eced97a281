"""The layers that `bench.stability` calls eagerly: tensors, and who computes."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cases import STAGES
from bench.draws import draw_all, draw_key
from bench.layer import LayerProblem, LayerScales, make_layer, make_layer_scales
from bench.ops import LAYER
from bench.problem import Cell, MemoryPool, make_plan
from bench.stability_plan import PlannedCall, Setting
from bench.timing import TimingPolicy

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes hidden states, w13, w2, top-k weights and ids."""


def moe_ext_layer(scale: str, scales: LayerScales) -> Layer:
    """`moe_ext.fused_moe`, which allocates output and workspace itself."""
    from moe_ext import fused_moe

    own = scales._asdict()

    def layer(hidden: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return fused_moe(hidden, w13, w2, weights, ids, **own)

    return layer


def vllm_layer(scale: str, scales: LayerScales) -> Layer:
    """vLLM's layer of Triton kernels, in BF16 or with scales per block. Written from its published
    interface (`quant_config`, 0.11 and newer)."""
    package = "vllm.model_executor.layers.fused_moe"
    fused_experts = importlib.import_module(f"{package}.fused_moe").fused_experts
    options = {}
    if scale == "block128":
        config = importlib.import_module(f"{package}.config")
        options["quant_config"] = config.fp8_w8a8_moe_quant_config(
            w1_scale=scales.w13_scale, w2_scale=scales.w2_scale, block_shape=[128, 128]
        )
    elif scale != "none":
        raise ValueError(f"vllm_layer: `scale` must be none or block128, got {scale}")

    def layer(hidden: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out: Tensor = fused_experts(hidden, w13, w2, weights, ids, **options)
        return out

    return layer


LAYERS: dict[str, Callable[[str, LayerScales], Layer]] = {
    "moe_ext": moe_ext_layer,
    "vllm": vllm_layer,
}


def is_there(provider: str) -> bool:
    """Return whether the provider's package can be imported."""
    return importlib.util.find_spec(provider) is not None


@dataclass(frozen=True)
class Calls:
    """Planned calls with their tensors on the device.

    Weights rotate over copies, so that a call finds none of its own in the L2 cache. Hidden states
    are rows of one tensor.
    """

    planned: Sequence[PlannedCall]  # ids and weights on the device
    problem: LayerProblem  # for its weights
    hidden_states: Tensor  # (most tokens, hidden_size), bfloat16
    layer: Layer

    def run(self, index: int, turn: int) -> Tensor:
        """Make call `index` with the copy of the weights whose turn it is."""
        call, copy = self.planned[index], turn % self.problem.plan.copies
        return self.layer(
            self.hidden_states[: call.num_tokens],
            self.problem.w13[copy],
            self.problem.w2[copy],
            call.weights,
            call.ids,
        )

    def warm_allocator(self, num_bytes: int) -> None:
        """Let torch's allocator keep a block to cut from: cudaMalloc is not what is measured."""
        torch.empty(num_bytes, dtype=torch.uint8, device=self.hidden_states.device)

    @property
    def out_bytes(self) -> int:
        """Bytes of the largest output."""
        return self.hidden_states.nbytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes that serve any provider's memory for the largest call several times over."""
        case = self.problem.plan.cell.case
        widest = 2 * max(3 * case.intermediate_size, case.hidden_size)
        return 4 * (self.hidden_states.shape[0] * case.top_k * widest + self.out_bytes)


def make_calls(
    setting: Setting, planned: Sequence[PlannedCall], device: torch.device, policy: TimingPolicy
) -> Calls:
    """Put everything on the device."""
    case = setting.case
    fewest = min(call.num_tokens for call in planned)
    most = max(call.num_tokens for call in planned)
    cell = Cell(case, STAGES, fewest, setting.dtype, setting.routing, op=LAYER)
    key = draw_key(case, fewest, setting.routing)
    plan = make_plan(cell, draw_all([key])[key], policy)
    problem = make_layer(plan, MemoryPool(plan.pool_bytes, setting.dtype, device))
    generator = torch.Generator(device=device).manual_seed(setting.seed)
    hidden = torch.randn((most, case.hidden_size), generator=generator, device=device)
    hidden *= case.hidden_size**-0.5
    on_device = [
        PlannedCall(
            call.num_tokens,
            call.ids.to(device),
            call.weights.to(device),
            call.rows_of_experts,
            call.floor_us,
        )
        for call in planned
    ]
    layer = LAYERS[setting.provider](setting.scale, make_layer_scales(problem, setting.scale))
    return Calls(on_device, problem, hidden.bfloat16(), layer)
