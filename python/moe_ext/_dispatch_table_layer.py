"""The measured choices for whole layers, where kernels most like two products' are not the best."""

from __future__ import annotations

from typing import NamedTuple

from moe_ext._dispatch_rows import LAYERS, Row


class LayerRow(NamedTuple):
    """A choice by the sizes of the first GEMM: n counts rows of gate and up, k is the hidden size.

    `row.config` is the first GEMM's kernel, `down` the second's.
    """

    row: Row
    down: str


def _row(kind: str, gate_up: str, down: str, measurement: str, **limits: float) -> LayerRow:
    dtype, accumulate = kind.split()
    where = f"{measurement}; H200, zipf0.6, {LAYERS}"
    return LayerRow(Row(dtype, accumulate, gate_up, where, **limits), down)  # type: ignore[arg-type]


# First match wins.
LAYER_TABLE: tuple[LayerRow, ...] = (
    _row(
        "fp8 block",
        "layer_fp8b_w64_t16",
        "layer_fp8b_w64_t16",
        "1.00x the best kernels' time over 4 layers, worst 1.00x (qwen3-next, T=4)",
        max_rows_per_group=0.3,
        min_n=1000,
        max_k=2100,
    ),
    _row(
        "fp8 block",
        "layer_fp8b_w64_t16",
        "layer_fp8b_w64_t16",
        "1.01x the best kernels' time over 2 layers, worst 1.01x (mixtral-tp4, T=1)",
        min_rows_per_group=0.2,
        max_rows_per_group=1.1,
        max_num_rows=8,
        max_n=8000,
        max_k=4100,
    ),
    _row(
        "fp8 block",
        "layer_fp8b_w64_t16",
        "layer_fp8b_w64_t16",
        "1.00x the best kernels' time over 1 layers, worst 1.00x (deepseek-v3-tp8, T=16)",
        min_rows_per_group=0.3,
        max_rows_per_group=0.6,
        max_n=600,
        min_k=7000,
    ),
    _row(
        "fp8 block",
        "layer_fp8b_w64_t16",
        "layer_fp8b_w64_t16",
        "1.00x the best kernels' time over 2 layers, worst 1.00x (qwen3-30b-tp4, T=64)",
        min_rows_per_group=0.5,
        max_rows_per_group=4.5,
        max_n=400,
        max_k=2100,
    ),
    _row(
        "fp8 block",
        "gated_fp8b_w128_t64",
        "swap_fp8b_w128_t64",
        "1.00x the best kernels' time over 2 layers, worst 1.00x (qwen3-30b-tp4, T=128)",
        min_rows_per_group=6,
        max_rows_per_group=9,
        max_n=1600,
        max_k=2100,
    ),
    _row(
        "fp8 block",
        "gated_fp8b_w128_t64",
        "swap_fp8b_w128_t64",
        "1.00x the best kernels' time over 2 layers, worst 1.00x (qwen3-30b-tp4, T=512)",
        min_rows_per_group=20,
        max_rows_per_group=70,
        max_n=400,
    ),
    _row(
        "fp8 promoted",
        "layer_fp8p_w64_t16",
        "layer_fp8p_w64_t16",
        "1.00x the best kernels' time over 3 layers, worst 1.00x (qwen3-next, T=4)",
        max_rows_per_group=0.1,
        min_n=1000,
        max_k=2100,
    ),
    _row(
        "fp8 promoted",
        "layer_fp8p_w64_t16",
        "layer_fp8p_w64_t16",
        "1.00x the best kernels' time over 1 layers, worst 1.00x (deepseek-v3-tp8, T=16)",
        min_rows_per_group=0.3,
        max_rows_per_group=0.6,
        max_n=600,
        min_k=7000,
    ),
    _row(
        "fp8 promoted",
        "layer_fp8p_w64_t16",
        "layer_fp8p_w64_t16",
        "1.00x the best kernels' time over 1 layers, worst 1.00x (qwen3-30b-tp4, T=16)",
        min_rows_per_group=0.5,
        max_rows_per_group=1.5,
        max_n=400,
        max_k=2100,
    ),
    _row(
        "fp8 promoted",
        "gated_fp8p_w128_t64",
        "swap_fp8p_w128_t64",
        "1.00x the best kernels' time over 2 layers, worst 1.00x (qwen3-30b-tp4, T=128)",
        min_rows_per_group=3,
        max_rows_per_group=9,
        max_n=400,
        max_k=2100,
    ),
    _row(
        "fp8 promoted",
        "gated_fp8p_w128_t64",
        "swap_fp8p_w128_t64",
        "1.00x the best kernels' time over 2 layers, worst 1.00x (deepseek-v3-tp8, T=256)",
        min_rows_per_group=3,
        max_rows_per_group=9,
        min_n=500,
        max_n=600,
        min_k=7000,
    ),
    _row(
        "fp8 promoted",
        "gated_fp8p_w128_t64",
        "swap_fp8p_w128_t64",
        "1.00x the best kernels' time over 3 layers, worst 1.00x (qwen3-235b, T=128)",
        min_rows_per_group=6,
        max_rows_per_group=9,
        max_n=3100,
        max_k=4100,
        min_n=1000,
    ),
    _row(
        "fp8 promoted",
        "gated_fp8p_w128_t64",
        "swap_fp8p_w128_t64",
        "1.00x the best kernels' time over 2 layers, worst 1.00x (qwen3-30b-tp4, T=512)",
        min_rows_per_group=20,
        max_rows_per_group=70,
        max_n=400,
    ),
    _row(
        "fp8 promoted",
        "layer_fp8p_w128_t128",
        "layer_fp8p_w128_t128",
        "1.00x the best kernels' time over 1 layers, worst 1.00x (deepseek-v3-ep8, T=512)",
        min_rows_per_group=100,
        max_rows_per_group=140,
        max_num_rows=4100,
        min_k=7000,
    ),
    _row(
        "bf16 fp32",
        "layer_bf16_w64_t32",
        "layer_bf16_w64_t32",
        "1.00x the best kernels' time over 9 layers, worst 1.02x (glm-4.5-air, T=1)",
        min_rows_per_group=0.025,
        min_num_rows=5,
        max_num_rows=12,
    ),
    _row(
        "bf16 fp32",
        "layer_bf16_w64_t16",
        "layer_bf16_w64_t16",
        "1.00x the best kernels' time over 1 layers, worst 1.00x (qwen3.5-397b, T=1)",
        max_rows_per_group=0.025,
        max_num_rows=12,
        min_k=4000,
    ),
    _row(
        "bf16 fp32",
        "layer_bf16_w128_t64",
        "layer_bf16_w128_t64",
        "1.00x the best kernels' time over 10 layers, worst 1.00x (glm-4.5-air-tp8, T=256)",
        min_rows_per_group=0.5,
        max_rows_per_group=70,
        max_n=400,
    ),
    _row(
        "bf16 fp32",
        "layer_bf16_w128_t64",
        "layer_bf16_w128_t64",
        "1.00x the best kernels' time over 1 layers, worst 1.00x (qwen3-30b, T=128)",
        min_rows_per_group=6,
        max_rows_per_group=9,
        min_n=1000,
        max_n=1600,
    ),
    _row(
        "bf16 fp32",
        "layer_bf16_w128_t128",
        "layer_bf16_w128_t128",
        "1.00x the best kernels' time over 3 layers, worst 1.00x (mixtral-tp4, T=512)",
        min_rows_per_group=30,
        max_rows_per_group=140,
        max_num_rows=1100,
        max_n=8000,
        max_k=4100,
    ),
)
