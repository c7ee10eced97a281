"""The kernels of a layer of experts in two precisions: a function of host numbers."""

from __future__ import annotations

import functools

from torch import Tensor

from moe_ext._activations import ACTIVATIONS, resolved
from moe_ext._configs import all_configs, planner
from moe_ext._fused_moe_checks import Layer
from moe_ext._fused_moe_kernels import choose_kernels
from moe_ext._fused_moe_scales import WeightScale, weight_scale_of
from moe_ext.precision._mixed_layer import MixedLayer
from moe_ext.precision.layer_plan import BF16, FP8

NONE = -1
FEW_TOKENS = 64
MANY_EXPERTS = 64


def choose_mixed_kernels(
    layer: MixedLayer, num_slots: int, sm_count: int
) -> tuple[int, int, int, int]:
    """Choose kernels for gate_up in FP8 and in BF16, then down in both; NONE where there is none.

    Those of the whole layer in one precision: an expert has as many rows there, and named layers
    were measured, some of their experts were not. Then what two GEMMs beside each other want.
    """
    scales = tuple(
        _layout(*pair)
        for pair in ((layer.w13_fp8, layer.w13_fp8_scale), (layer.w2_fp8, layer.w2_fp8_scale))
    )
    biases = (layer.w13_fp8_bias is not None, layer.w13_bf16_bias is not None)
    form = ACTIVATIONS[layer.activation]
    options = (layer.activation, form.gated, *resolved(layer.activation, layer.alpha, layer.limit))
    return _choose(
        layer.counts,
        num_slots,
        layer.sizes,
        (*options, layer.gate_up_layout),
        scales,
        biases,
        layer.accumulate,
        layer.batch_invariant,
        sm_count,
    )


def _layout(weight: Tensor | None, scale: Tensor | None) -> WeightScale | None:
    if weight is None or scale is None:
        return None
    return weight_scale_of(tuple(scale.shape), *weight.shape)


@functools.lru_cache(maxsize=1024)
def _choose(
    counts: tuple[int, int, int, int],
    num_slots: int,
    sizes: tuple[int, int, int],
    options: tuple[str, bool, float, float, str],
    scales: tuple[WeightScale | None, ...],
    biases: tuple[bool, bool],
    accumulate: str,
    batch_invariant: bool,
    sm_count: int,
) -> tuple[int, int, int, int]:
    both_fp8, gate_up_fp8, both_bf16, down_fp8 = counts
    hidden, intermediate, num_experts = sizes
    chosen = {}
    for kind, gate_up, down in (
        (FP8, both_fp8 + gate_up_fp8, both_fp8 + down_fp8),
        (BF16, both_bf16 + down_fp8, gate_up_fp8 + both_bf16),
    ):
        fp8 = kind == FP8
        # A stage that has nothing in FP8 has no layout: the other one's serves both.
        layouts = (scales[0] or scales[1], scales[1] or scales[0]) if fp8 else (None, None)
        kernels = None
        if gate_up or down:
            kernels = choose_kernels(
                Layer(num_slots, 1, hidden, intermediate, num_experts, fp8, *options, *layouts),
                accumulate if fp8 else "promoted",
                biases[0 if fp8 else 1],
                batch_invariant,
                sm_count,
            )
        chosen[0, kind] = kernels.gate_up if kernels and gate_up else NONE
        chosen[1, kind] = kernels.down if kernels and down else NONE
    if NONE not in (chosen[0, BF16], chosen[1, BF16]) and _serves_both(chosen[0, BF16], hidden):
        chosen[1, BF16] = chosen[0, BF16]
    for stage, bf16 in ((0, both_bf16 + down_fp8), (1, gate_up_fp8 + both_bf16)):
        pair = chosen[stage, FP8], chosen[stage, BF16]
        if NONE in pair:
            continue
        if planner().are_few(bf16, num_experts):
            first, second = pair
            if 2 * num_slots <= num_experts and not batch_invariant:
                first = _with_large_places(first)
            pair = first, _beside(first, second, hidden)
        elif not batch_invariant and hidden % 16 == 0 and num_experts >= MANY_EXPERTS:
            pair = _of_half(*pair, num_slots / num_experts)
        chosen[stage, FP8], chosen[stage, BF16] = pair
    return chosen[0, FP8], chosen[0, BF16], chosen[1, FP8], chosen[1, BF16]


def _serves_both(gate_up: int, hidden: int) -> bool:
    """Whether a kernel of few tokens can run down too.

    Another one would have to be fetched, behind the kernel in FP8: it costs more than it saves.
    """
    config = all_configs()[gate_up]
    return config.output == "either" and config.tile_tokens < FEW_TOKENS and hidden % 16 == 0


def _with_large_places(fp8: int) -> int:
    """Return the kernel with two CTAs an SM for the one with three, else that one.

    A place that it leaves free holds a CTA in BF16 with more of its weights under way: qwen3-30b
    per block with 3 of 128 experts in BF16 takes 39.6 us in place of 40.3 at T = 4, though in FP8
    alone it is no faster (docs/notes/mixtures.md).
    """
    own = all_configs()[fp8]
    three = (own.output, own.tile_weights, own.tile_tokens) == ("either", 64, 16)
    return _of_tile(fp8, 64, 32) if three else fp8


def _beside(fp8: int, bf16: int, hidden: int) -> int:
    """Return the kernel in BF16 that fits on SMs where one in FP8 left a place free, else `bf16`.

    With few experts in BF16 that is what they wait for (csrc/fused_moe/mixed_order.hpp).
    """
    like = all_configs()[fp8]
    if like.tile_tokens >= FEW_TOKENS or (like.output == "either" and hidden % 16):
        return bf16
    shape = ("output", "tile_weights", "tile_tokens", "split_k", "ctas_per_sm")
    for config in all_configs():
        if config.dtype == BF16 and all(getattr(config, n) == getattr(like, n) for n in shape):
            return config.index
    return bf16


def _of_half(fp8: int, bf16: int, rows: float) -> tuple[int, int]:
    """Return the kernels where many experts are in BF16, by the rows that an expert has.

    Measured with half of one layer's, qwen3-30b per block (docs/notes/mixtures.md): with kernels
    that have an SM for each CTA, 16 rows took 4 % less than with what each layer by itself has, and
    8 rows, in BF16 alone, up to 0.4 % less. At one row three CTAs an SM in FP8 beside two in BF16
    took 0.6 % less. Far more rows or far fewer experts were not.
    """
    if rows < 2:
        return _of_tile(fp8, 64, 16), bf16
    if not 8 <= rows < 32:
        return fp8, bf16
    return (_of_tile(fp8, 128, 128) if rows >= 16 else fp8), _of_tile(bf16, 128, 128)


def _of_tile(index: int, weights: int, tokens: int) -> int:
    """Return the kernel of such a tile for both GEMMs that sums like another, else that one."""
    accumulate = all_configs()[index].accumulate
    for config in all_configs():
        tile = (config.output, config.tile_weights, config.tile_tokens)
        if config.accumulate == accumulate and tile == ("either", weights, tokens):
            return config.index
    return index
