"""The compiled kernels, the operands they take, and runs that show what was written."""

from __future__ import annotations

import moe_ext
from moe_ext._configs import GroupedGemmConfig, all_configs

from support.inputs import poisoned_out
from support.tolerance import assert_untouched

KERNELS = {config.id: config for config in moe_ext.kernels() if config.output == "rows"}


def kind_of(config):
    """The operands that a kernel takes, as `support.inputs` names them."""
    return {"block": "fp8_block", "shifted": "fp8_shifted"}.get(config.accumulate, config.dtype)


def accumulate_of(config):
    return "fast" if config.accumulate == "fast" else "promoted"


def rows_kernel(gate_up: GroupedGemmConfig, hidden: int = 16) -> GroupedGemmConfig:
    """A kernel of a layer's second GEMM for one of the first: itself if it can."""
    if gate_up.output == "either" and hidden % 16 == 0:
        return gate_up
    return next(
        config
        for config in all_configs()
        if config.output == "rows"
        and (config.dtype, config.accumulate, config.split_k)
        == (gate_up.dtype, gate_up.accumulate, 1)
        and config.order != "SwapABRows"
    )


def gathering_kernels(accumulate: str) -> list[GroupedGemmConfig]:
    """The kernels of a layer's first GEMM that find tokens where they lie (`gathers_tokens`)."""

    def pays(config: GroupedGemmConfig) -> bool:
        deep = config.tile_k_bytes > 128 or config.mma_warp_groups == 3
        return config.accumulate == "promoted" and config.tile_tokens >= 64 and deep

    return [
        config
        for config in all_configs()
        if config.output != "rows" and config.accumulate == accumulate and not pays(config)
    ]


def run_into_poison(problem, out_dtype, **options):
    """Run into an output of NaN; what must not be written must be NaN after it."""
    num_rows, n = problem.a.shape[0], problem.b.shape[1]
    out = poisoned_out(num_rows, n, out_dtype, "cuda")
    moe_ext.grouped_gemm_out(*problem.args, **problem.scales, out=out, **options)
    assert_untouched(out[problem.num_valid :])
    row_stride = out.stride(0)
    assert_untouched(out.as_strided((num_rows, row_stride - n), (row_stride, 1), n))
    return out[: problem.num_valid]
