"""The measured choices for layers in FP8 with scales per block; see `_dispatch_table_layer`."""

from __future__ import annotations

from moe_ext._dispatch_rows import LayerRow, layer_row

CHOICES: tuple[LayerRow, ...] = (
    layer_row(
        "fp8 block",
        "gated_fp8b_plain",
        "plain_fp8b_w256_t128",
        "0.86x the other choice's time (glm-4.5-air-tp8, T=2048 and 4096)",
        where="bench/results/h200-2026-11-30-1c0e5bd.jsonl against -1a0a371.jsonl",
        min_rows_per_group=100,
        max_n=400,
        min_k=4000,
    ),
    layer_row(
        "fp8 block",
        "layer_fp8b_w64_t16",
        "layer_fp8b_w64_t16",
        "1.00x the best kernels' time over 4 layers, worst 1.00x (qwen3-next, T=4)",
        max_rows_per_group=0.3,
        min_n=1000,
        max_k=2100,
    ),
    layer_row(
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
    layer_row(
        "fp8 block",
        "layer_fp8b_w64_t16",
        "layer_fp8b_w64_t16",
        "1.00x the best kernels' time over 1 layers, worst 1.00x (deepseek-v3-tp8, T=16)",
        min_rows_per_group=0.3,
        max_rows_per_group=0.6,
        max_n=600,
        min_k=7000,
    ),
    layer_row(
        "fp8 block",
        "layer_fp8b_w64_t16",
        "layer_fp8b_w64_t16",
        "1.00x the best kernels' time over 2 layers, worst 1.00x (qwen3-30b-tp4, T=64)",
        min_rows_per_group=0.5,
        max_rows_per_group=4.5,
        max_n=400,
        max_k=2100,
    ),
    layer_row(
        "fp8 block",
        "gated_fp8b_w128_t64",
        "swap_fp8b_w128_t64",
        "1.00x the best kernels' time over 2 layers, worst 1.00x (qwen3-30b-tp4, T=128)",
        min_rows_per_group=6,
        max_rows_per_group=9,
        max_n=1600,
        max_k=2100,
    ),
    layer_row(
        "fp8 block",
        "gated_fp8b_w128_t64",
        "swap_fp8b_w128_t64",
        "1.00x the best kernels' time over 2 layers, worst 1.00x (qwen3-30b-tp4, T=512)",
        min_rows_per_group=20,
        max_rows_per_group=70,
        max_n=400,
    ),
)
