"""The measured choices for layers in BF16; see `_dispatch_table_layer`."""

from __future__ import annotations

from moe_ext._dispatch_rows import LayerRow, layer_row

CHOICES: tuple[LayerRow, ...] = (
    layer_row(
        "bf16 fp32",
        "layer_bf16_w64_t32",
        "layer_bf16_w64_t32",
        "1.00x the best kernels' time over 9 layers, worst 1.02x (glm-4.5-air, T=1)",
        min_rows_per_group=0.025,
        min_num_rows=5,
        max_num_rows=12,
    ),
    layer_row(
        "bf16 fp32",
        "layer_bf16_w64_t16",
        "layer_bf16_w64_t16",
        "1.00x the best kernels' time over 1 layers, worst 1.00x (qwen3.5-397b, T=1)",
        max_rows_per_group=0.025,
        max_num_rows=12,
        min_k=4000,
    ),
    layer_row(
        "bf16 fp32",
        "layer_bf16_w128_t64",
        "layer_bf16_w128_t64",
        "1.00x the best kernels' time over 10 layers, worst 1.00x (glm-4.5-air-tp8, T=256)",
        min_rows_per_group=0.5,
        max_rows_per_group=70,
        max_n=400,
    ),
    layer_row(
        "bf16 fp32",
        "layer_bf16_w128_t64",
        "layer_bf16_w128_t64",
        "1.00x the best kernels' time over 1 layers, worst 1.00x (qwen3-30b, T=128)",
        min_rows_per_group=6,
        max_rows_per_group=9,
        min_n=1000,
        max_n=1600,
    ),
    layer_row(
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
