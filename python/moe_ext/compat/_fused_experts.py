"""`fused_experts`: the signature of vLLM's function of that name on moe_ext's layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_ext._activations import CONCATENATED, INTERLEAVED
from moe_ext.compat._quantization import Quantization, from_config, refuse, scales
from moe_ext.fused_moe import fused_moe

# vLLM's names; those that end in no_mul have no up projection.
_GATED = {
    "silu": ("swiglu", CONCATENATED),
    "gelu": ("geglu", CONCATENATED),
    "gelu_tanh": ("geglu_tanh", CONCATENATED),
    "swigluoai": ("swiglu_oai", INTERLEAVED),
    "swigluoai_uninterleave": ("swiglu_oai", CONCATENATED),
}
_UNGATED = {
    "silu_no_mul": ("silu", CONCATENATED),
    "relu2_no_mul": ("relu2", CONCATENATED),
}
_WITHOUT_MUL = {"silu": "silu_no_mul", "relu2": "relu2_no_mul"}


def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    inplace: bool = False,
    activation: Any = "silu",
    *,
    is_act_and_mul: bool = True,
    apply_router_weight_on_input: bool = False,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    use_int4_w4a16: bool = False,
    use_mxfp4_w4a4: bool = False,
    ocp_mx_scheme: str | None = None,
    per_channel_quant: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w1_zp: Tensor | None = None,
    w2_zp: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    block_shape: Sequence[int] | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    quant_config: Any | None = None,
    allow_deep_gemm: bool = False,
    allow_cutlass_block_scaled_grouped_gemm: bool = False,
) -> Tensor:
    """Run the experts of a layer, called as vLLM's `fused_experts`.

    Its versions differ in the order of what follows `activation`, which has to be given by name.

    Args:
        hidden_states: (num_tokens, hidden), bfloat16.
        w1: (num_experts, 2 * intermediate, hidden), bfloat16 or float8_e4m3fn: gate rows, then up
            rows, alternating for "swigluoai"; (num_experts, intermediate, hidden) without up.
        w2: (num_experts, hidden, intermediate).
        topk_weights: (num_tokens, top_k), float32 or bfloat16.
        topk_ids: (num_tokens, top_k), int32 or int64; ids without an expert add nothing.
        inplace: write the result to `hidden_states` and return it; costs a copy.
        activation: "silu", "gelu" (exact), "gelu_tanh", "swigluoai", "swigluoai_uninterleave",
            "silu_no_mul", "relu2_no_mul", or a member of an enumeration with such a value.
        is_act_and_mul: False for experts without up: "silu" and "relu2" then are such.
        apply_router_weight_on_input: multiply hidden states by their weights instead of results.
        use_fp8_w8a8: whether the weights are FP8; scales say how.
        use_int8_w8a8: must be False, as no kernel here has it; likewise the next four.
        use_int8_w8a16: see `use_int8_w8a8`.
        use_int4_w4a16: see `use_int8_w8a8`.
        use_mxfp4_w4a4: see `use_int8_w8a8`.
        ocp_mx_scheme: must be None.
        per_channel_quant: scales of weights per channel, of activations per row.
        global_num_experts: -1, or the number of experts of all ranks: that of `expert_map`, or of
            `w1` without one.
        expert_map: (global_num_experts,), int32: which expert of `w1` an id is, -1 for none.
        w1_scale: float32; (num_experts,), with `per_channel_quant` (num_experts, n) or
            (num_experts, n, 1), with `block_shape` (num_experts, ceil(n / 128), ceil(k / 128)) or
            with gate and up in blocks of their own.
        w2_scale: likewise for `w2`.
        w1_zp: must be None.
        w2_zp: must be None.
        a1_scale: float32, one value: a static scale of hidden states. None computes one for each
            row or 128 of it, also where vLLM computes one for the whole tensor.
        a2_scale: likewise for the intermediate.
        block_shape: [128, 128] or None.
        w1_bias: (num_experts, n), float32 or bfloat16.
        w2_bias: (num_experts, hidden), likewise.
        quant_config: in place of all arguments on scales, biases and formats: an object with the
            properties of vLLM's `FusedMoEQuantConfig`.
        allow_deep_gemm: permits another library, which is never needed; no effect.
        allow_cutlass_block_scaled_grouped_gemm: likewise.

    Returns:
        (num_tokens, hidden), bfloat16.

    Raises:
        ValueError: an option that moe_ext has not got, flags and tensors that contradict each
            other, or what `moe_ext.fused_moe` refuses. Nothing is ignored.
        RuntimeError: the CUDA library cannot run here.
    """
    unknown = {
        "use_int8_w8a8": use_int8_w8a8,
        "use_int8_w8a16": use_int8_w8a16,
        "use_int4_w4a16": use_int4_w4a16,
        "use_mxfp4_w4a4": use_mxfp4_w4a4,
        "ocp_mx_scheme": ocp_mx_scheme,
        "w1_zp": w1_zp,
        "w2_zp": w2_zp,
    }
    refuse(unknown, "")
    said = Quantization(
        use_fp8_w8a8,
        per_channel_quant,
        None if block_shape is None else tuple(block_shape),
        w1_scale,
        w2_scale,
        a1_scale,
        a2_scale,
        w1_bias,
        w2_bias,
    )
    if quant_config is not None:
        if any(value is not None and value is not False for value in said):
            raise ValueError(
                "fused_experts: `quant_config` must be None beside flags, scales or biases, got "
                f"{type(quant_config).__name__}"
            )
        said = from_config(quant_config)
    name, layout = _activation(activation, is_act_and_mul)
    _check_experts(global_num_experts, expert_map, w1.shape[0])
    out = fused_moe(
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        **scales(said, w1, w2, gated=name not in ("silu", "relu2")),
        w13_bias=said.w1_bias,
        w2_bias=said.w2_bias,
        activation=name,
        alpha=said.alpha,
        limit=said.limit,
        gate_up_layout=layout,
        apply_router_weight_on_input=apply_router_weight_on_input,
        expert_map=expert_map,
    )
    return hidden_states.copy_(out) if inplace else out


def _activation(activation: Any, is_act_and_mul: bool) -> tuple[str, str]:
    name = getattr(activation, "value", activation)
    if not is_act_and_mul:
        name = _WITHOUT_MUL.get(name, name)
    known = _UNGATED if not is_act_and_mul else _GATED | _UNGATED
    if name not in known:
        raise ValueError(
            f"fused_experts: `activation` must be one of {', '.join(known)}"
            f"{'' if is_act_and_mul else ' without is_act_and_mul'}, got {activation!r}"
        )
    return known[name]


def _check_experts(given: int, expert_map: Tensor | None, num_experts: int) -> None:
    expected = num_experts if expert_map is None else expert_map.numel()
    if given not in (-1, expected):
        of = "`w1`" if expert_map is None else "`expert_map`"
        raise ValueError(
            f"fused_experts: `global_num_experts` must be -1 or {expected}, the number of experts "
            f"of {of}, got {given}"
        )
