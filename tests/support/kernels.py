"""The compiled kernels, the operands they take, and runs that show what was written."""

from __future__ import annotations

import moe_ext

from support.inputs import poisoned_out
from support.tolerance import assert_untouched

KERNELS = {config.id: config for config in moe_ext.kernels() if config.output == "rows"}


def kind_of(config):
    """The operands that a kernel takes, as `support.inputs` names them."""
    return {"block": "fp8_block", "shifted": "fp8_shifted"}.get(config.accumulate, config.dtype)


def accumulate_of(config):
    return "fast" if config.accumulate == "fast" else "promoted"


def run_into_poison(problem, out_dtype, **options):
    """Run into an output of NaN; what must not be written must be NaN after it."""
    num_rows, n = problem.a.shape[0], problem.b.shape[1]
    out = poisoned_out(num_rows, n, out_dtype, "cuda")
    moe_ext.grouped_gemm_out(*problem.args, **problem.scales, out=out, **options)
    assert_untouched(out[problem.num_valid :])
    row_stride = out.stride(0)
    assert_untouched(out.as_strided((num_rows, row_stride - n), (row_stride, 1), n))
    return out[: problem.num_valid]
