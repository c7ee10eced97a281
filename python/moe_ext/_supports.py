"""`moe_ext.supports`: whether this build and device run a problem, or why not."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moe_ext._library import cuda_device
from moe_ext._problem_parts import check_parts
from moe_ext._problems import CHECKS


@dataclasses.dataclass(frozen=True)
class Support:
    """The answer of `supports`: true where the problem runs.

    Attributes:
        reason: why it does not, in the words of the op; empty where it does.
    """

    reason: str = ""

    def __bool__(self) -> bool:
        """Whether the problem runs."""
        return not self.reason

    def __str__(self) -> str:
        """Say it in a line."""
        return f"not supported: {self.reason}" if self.reason else "supported"


def supports(
    op: str = "grouped_gemm", *, device: torch.device | str | int | None = None, **problem: Any
) -> Support:
    """Say whether this build and device run a problem, or why not.

    Args:
        op: "grouped_gemm", "grouped_gemm_masked", "fused_moe", "fused_moe_masked", "quantize_fp8",
            "topk_routing", "sort_tokens" or "combine_tokens".
        device: a CUDA device or its index; None is the current one. "cpu" asks whether the
            reference runs the problem.
        **problem: sizes and dtypes, and options of the op by their names there. dtypes are torch's
            or "bf16", "fp8", "fp16", "fp32". `dtype` is that of the operands, in layers of the
            weights.

            - "grouped_gemm": dtype, num_rows, num_groups, n, k
            - "grouped_gemm_masked": the same with max_rows, of a group, in place of num_rows
            - "fused_moe": dtype, num_tokens, top_k, hidden_size, intermediate_size, num_experts
            - "fused_moe_masked": the same with max_rows, of an expert, in place of num_tokens and
              top_k
            - "quantize_fp8": dtype, shape, granularity
            - "topk_routing": num_tokens, num_experts, top_k, and dtype if logits are not bf16
            - "sort_tokens": num_tokens, top_k, num_experts, and dtype if ids are not torch.int32
            - "combine_tokens": num_tokens, top_k, hidden_size

            Tensors that a call may have or not are said by their form: `scale_a`, `scale_b`,
            `w13_scale` and `w2_scale` as "tensor", "channel", "block" or a shape; `a1_scale`,
            `a2_scale`, `bias` (in layers `w13_bias`, `w2_bias`), `correction_bias` and `addend` as
            True.

    Returns:
        A `Support`: false where the op would raise, with its message as `reason`.

    Raises:
        ValueError: there is no such op.
        TypeError: something of the problem is missing, is not a part of it, or has a value of
            another kind.

    Notes:
        Tensors are taken as contiguous and aligned. Whether memory suffices is not looked at.
        Opens the CUDA library, launches nothing.

    Example:
        >>> sizes = {"num_tokens": 64, "top_k": 8, "hidden_size": 2048, "num_experts": 128}
        >>> scales = {"w13_scale": "block", "w2_scale": "block"}
        >>> support = supports(
        ...     "fused_moe", device="cpu", dtype="fp8", intermediate_size=768, **sizes, **scales
        ... )
        >>> bool(support)
        True
        >>> problem = {"dtype": "bf16", "num_rows": 64, "num_groups": 8, "n": 100, "k": 256}
        >>> print(supports("grouped_gemm", device="cpu", **problem).reason)
        grouped_gemm: `b` must have n a multiple of 8 for bfloat16 output, got 100
    """
    check = CHECKS.get(op) if isinstance(op, str) else None
    if check is None:
        raise ValueError(f"supports: `op` must be one of {', '.join(CHECKS)}, got {op!r}")
    try:
        check_parts("supports", op, problem)
        check(**problem)
        if str(device) != "cpu":
            cuda_device("supports", device)
    except (ValueError, RuntimeError) as error:
        return Support(str(error))
    return Support()
