"""What the kernels must compute, in plain fp32 PyTorch: for tests, benchmarks and the CPU.

Needs PyTorch's default `torch.set_float32_matmul_precision("highest")` to be exact to fp32.
"""

from __future__ import annotations

from moe_ext._fused_moe_masked_reference import fused_moe_masked_reference
from moe_ext._fused_moe_reference import fused_moe_reference
from moe_ext._grouped_gemm_reference import group_rows, grouped_gemm_reference
from moe_ext._quantize_reference import (
    FP8_MAX,
    quantize_fp8_per_block,
    quantize_fp8_per_tensor,
    quantize_fp8_reference,
)
from moe_ext._routing_reference import topk_routing_reference
from moe_ext._tokens_reference import combine_tokens_reference, sort_tokens_reference

__all__ = [
    "FP8_MAX",
    "combine_tokens_reference",
    "fused_moe_masked_reference",
    "fused_moe_reference",
    "group_rows",
    "grouped_gemm_reference",
    "quantize_fp8_per_block",
    "quantize_fp8_per_tensor",
    "quantize_fp8_reference",
    "sort_tokens_reference",
    "topk_routing_reference",
]
