"""The reference of a whole layer with the sums of the kernels, for benchmarks and tests."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def layer_by_parts(*operands: Tensor, **options: Any) -> Tensor:
    """Run `moe_ext.reference.fused_moe_reference` with its first GEMM by `moe_ext.grouped_gemm`.

    All kernels without split-K add up K in one order (tests/test_kernels_gpu.py), gated ones too:
    so what becomes FP8 differs from the layer's by the activation's last bits alone. The GEMM has
    tests of its own.
    """
    # Here, so that other providers are measured where moe_ext is not.
    from moe_ext.reference import fused_moe_reference

    return fused_moe_reference(*operands, **options, gate_up_gemm=_gate_up_gemm)


def _gate_up_gemm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    **options: Any,
) -> Tensor:
    import moe_ext

    kind = "bf16"
    if scale_a is not None:
        kind = "fp8b" if scale_a.dim() == 2 else "fp8p"
    return moe_ext.grouped_gemm(
        moe_ext.pad_rows(a),
        b,
        offs,
        scale_a=scale_a,
        scale_b=scale_b,
        config=f"swap_{kind}_w64_t16" if a.is_cuda else None,  # no split-K, any sizes and scales
        **options,
    )
