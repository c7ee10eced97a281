"""Every documented argument error of `fused_moe`, the same on the CPU, on CUDA and for fakes."""

from __future__ import annotations

import re

import moe_ext
import pytest
import torch

FP8 = torch.float8_e4m3fn
TOKENS, EXPERTS, TOP_K, HIDDEN, INNER = 6, 4, 2, 160, 136


def of(dtype, *shape):
    return lambda device: torch.ones(shape, device=device).to(dtype)


def bf16(*shape):
    return of(torch.bfloat16, *shape)


def float32(*shape):
    return of(torch.float32, *shape)


def fp8(*shape):
    # Rows padded to a multiple of 16 bytes, as `pad_rows` does it, also for fakes.
    columns = -(-shape[-1] // 16) * 16
    return lambda device: of(FP8, *shape[:-1], columns)(device)[..., : shape[-1]]


def ids(dtype, *shape):
    return of(dtype, *shape)


def value(constant):
    return lambda device: constant


FP8_WEIGHTS = {
    "w13": fp8(EXPERTS, 2 * INNER, HIDDEN),
    "w2": fp8(EXPERTS, HIDDEN, INNER),
    "w13_scale": float32(EXPERTS),
    "w2_scale": float32(EXPERTS),
}
BLOCKS = {"w13_scale": float32(EXPERTS, 2, 2, 2), "w2_scale": float32(EXPERTS, 2, 2)}
ERRORS = {
    "hidden_dtype": (
        {"hidden_states": float32(TOKENS, HIDDEN)},
        "`hidden_states` must be bfloat16, got float32",
    ),
    "hidden_rank": (
        {"hidden_states": bf16(1, TOKENS, HIDDEN)},
        "`hidden_states` must have shape (num_tokens, hidden), got (1, 6, 160)",
    ),
    "hidden_columns": (
        {"hidden_states": lambda device: bf16(HIDDEN, TOKENS)(device).T},
        "`hidden_states` must have a contiguous last dimension and its other strides at least 160 "
        "and multiples of 8 (16 bytes), got strides (1, 6) for shape (6, 160)",
    ),
    "hidden_stride": (
        {"hidden_states": lambda device: bf16(TOKENS, HIDDEN + 4)(device)[:, :HIDDEN]},
        "`hidden_states` must have a contiguous last dimension and its other strides at least 160 "
        "and multiples of 8 (16 bytes), got strides (164, 1) for shape (6, 160)",
    ),
    "w13_dtype": (
        {"w13": of(torch.float16, EXPERTS, 2 * INNER, HIDDEN)},
        "`w13` must be bfloat16 or float8_e4m3fn, got float16",
    ),
    "w2_dtype": (
        {"w2": fp8(EXPERTS, HIDDEN, INNER)},
        "`w2` must be bfloat16 to match `w13`, got float8_e4m3fn",
    ),
    "w2_rank": (
        {"w2": bf16(HIDDEN, INNER)},
        "`w2` must have shape (num_experts, hidden, intermediate) = (*, 160, *) to match "
        "`hidden_states`, got (160, 136)",
    ),
    "w2_transposed": (
        {"w2": bf16(EXPERTS, INNER, HIDDEN)},
        "`w2` must have shape (num_experts, hidden, intermediate) = (*, 160, *) to match "
        "`hidden_states`, got (4, 136, 160)",
    ),
    "w13_of_an_ungated_layer": (
        {"w13": bf16(EXPERTS, INNER, HIDDEN)},
        "`w13` must have shape (num_experts, 2 * intermediate, hidden) = (4, 272, 160) to match "
        "`w2` and `hidden_states`, got (4, 136, 160)",
    ),
    "w13_of_a_gated_layer": (
        {"activation": value("relu2")},
        "`w13` must have shape (num_experts, intermediate, hidden) = (4, 136, 160) to match "
        "`w2` and `hidden_states`, got (4, 272, 160)",
    ),
    "w13_experts": (
        {"w13": bf16(EXPERTS + 1, 2 * INNER, HIDDEN)},
        "= (4, 272, 160) to match `w2` and `hidden_states`, got (5, 272, 160)",
    ),
    "no_experts": (
        {"w13": bf16(0, 2 * INNER, HIDDEN), "w2": bf16(0, HIDDEN, INNER)},
        "`w13` must have 1 to 4096 experts, got 0",
    ),
    "too_many_experts": (
        {"w13": bf16(4097, 16, HIDDEN), "w2": bf16(4097, HIDDEN, 8)},
        "`w13` must have 1 to 4096 experts, got 4097",
    ),
    "hidden_size": (
        {
            "hidden_states": bf16(TOKENS, 12),
            "w13": bf16(EXPERTS, 2 * INNER, 12),
            "w2": bf16(EXPERTS, 12, INNER),
        },
        "`hidden_states` must have a positive hidden size that is a multiple of 8, got 12",
    ),
    "intermediate_size": (
        {"w13": bf16(EXPERTS, 24, HIDDEN), "w2": bf16(EXPERTS, HIDDEN, 12)},
        "`w2` must have a positive intermediate size that is a multiple of 8, got 12",
    ),
    "w2_fp8_rows": (
        FP8_WEIGHTS | {"w2": of(FP8, EXPERTS, HIDDEN, INNER)},
        "`w2` must have a contiguous last dimension and its other strides at least 136 and "
        "multiples of 16 (16 bytes), got strides (21760, 136, 1) for shape (4, 160, 136); "
        "moe_ext.pad_rows makes such a copy",
    ),
    "weights_dtype": (
        {"topk_weights": of(torch.float16, TOKENS, TOP_K)},
        "`topk_weights` must be bfloat16 or float32, got float16",
    ),
    "weights_shape": (
        {"topk_weights": float32(TOKENS, 1)},
        "`topk_weights` must have the shape (6, 2) of `topk_ids`, got (6, 1)",
    ),
    "ids_strides": (
        {"topk_ids": lambda device: ids(torch.int32, TOP_K, TOKENS)(device).T},
        "`topk_ids` must have a contiguous last dimension, got strides (1, 6) for shape (6, 2)",
    ),
    "ids_dtype": (
        {"topk_ids": float32(TOKENS, TOP_K)},
        "`topk_ids` must be int32 or int64, got float32",
    ),
    "ids_tokens": (
        {"topk_ids": ids(torch.int32, TOKENS + 1, TOP_K)},
        "`topk_ids` must have shape (num_tokens, top_k) = (6, *) to match `hidden_states`, got "
        "(7, 2)",
    ),
    "ids_rank": (
        {"topk_ids": ids(torch.int32, TOKENS)},
        "`topk_ids` must have shape (num_tokens, top_k) = (6, *) to match `hidden_states`, got "
        "(6,)",
    ),
    "top_0": (
        {"topk_ids": ids(torch.int32, TOKENS, 0)},
        "`topk_ids` must have 1 to 32 columns, got 0",
    ),
    "top_33": (
        {"topk_ids": ids(torch.int32, TOKENS, 33)},
        "`topk_ids` must have 1 to 32 columns, got 33",
    ),
    "scale_of_bf16": (
        {"w2_scale": float32(EXPERTS)},
        "`w2_scale` must be None for bfloat16 weights, got shape (4,)",
    ),
    "static_scale_of_bf16": (
        {"a1_scale": float32()},
        "`a1_scale` must be None for bfloat16 weights, got shape ()",
    ),
    "no_scale": (
        FP8_WEIGHTS | {"w2_scale": value(None)},
        "`w2_scale` must be given for float8_e4m3fn weights, got None",
    ),
    "scale_dtype": (
        FP8_WEIGHTS | {"w13_scale": bf16(EXPERTS)},
        "`w13_scale` must be float32, got bfloat16",
    ),
    "w13_scale_shape": (
        FP8_WEIGHTS | {"w13_scale": float32(EXPERTS, 2)},
        "`w13_scale` must have shape () or (num_experts,) = (4,), per channel (4, 272) or (4, 272, "
        "1), or per block of 128 x 128 (4, 3, 2) or, with grids of gate and up apart, (4, 2, 2, 2)"
        ", got (4, 2)",
    ),
    "joined_grids_of_gate_and_up": (
        FP8_WEIGHTS | {"w13_scale": float32(EXPERTS, 4, 2)},
        "per block of 128 x 128 (4, 3, 2) or, with grids of gate and up apart, (4, 2, 2, 2), got "
        "(4, 4, 2)",
    ),
    "w2_scale_shape": (
        FP8_WEIGHTS | {"w2_scale": float32(EXPERTS, 2, 1, 2)},
        "`w2_scale` must have shape () or (num_experts,) = (4,), per channel (4, 160) or (4, 160, "
        "1), or per block of 128 x 128 (4, 2, 2), got (4, 2, 1, 2)",
    ),
    "grids_of_interleaved_rows": (
        FP8_WEIGHTS | BLOCKS | {"gate_up_layout": value("interleaved")},
        '`w13_scale` must have one grid of blocks for the gate_up_layout "interleaved", got shape '
        "(4, 2, 2, 2)",
    ),
    "static_scale_with_blocks": (
        FP8_WEIGHTS | BLOCKS | {"a2_scale": float32()},
        "`a2_scale` must be None unless `w2_scale` is per tensor or expert, got shape ()",
    ),
    "static_scale_shape": (
        FP8_WEIGHTS | {"a1_scale": float32(EXPERTS)},
        "`a1_scale` must have shape () or (1,), got (4,)",
    ),
    "static_scale_dtype": (
        FP8_WEIGHTS | {"a1_scale": bf16()},
        "`a1_scale` must be float32, got bfloat16",
    ),
    "w13_bias_shape": (
        {"w13_bias": float32(EXPERTS, INNER)},
        "`w13_bias` must have shape (num_experts, 2 * intermediate) = (4, 272), got (4, 136)",
    ),
    "w2_bias_shape": (
        {"w2_bias": float32(EXPERTS, INNER)},
        "`w2_bias` must have shape (num_experts, hidden) = (4, 160), got (4, 136)",
    ),
    "w2_bias_dtype": (
        {"w2_bias": of(torch.float16, EXPERTS, HIDDEN)},
        "`w2_bias` must be bfloat16 or float32, got float16",
    ),
    "activation": (
        {"activation": value("gelu")},
        '`activation` must be one of "swiglu", "swiglu_oai", "geglu", "geglu_tanh", "relu2", '
        '"silu", got "gelu"',
    ),
    "alpha_of_swiglu": (
        {"alpha": value(1.5)},
        '`alpha` must be None for the activation "swiglu", got 1.5',
    ),
    "alpha_0": (
        {"activation": value("swiglu_oai"), "alpha": value(0.0)},
        "`alpha` must be positive, got 0.0",
    ),
    "alpha_inf": (
        {"activation": value("swiglu_oai"), "alpha": value(float("inf"))},
        "`alpha` must be finite in float32, got inf",
    ),
    "alpha_beyond_float32": (
        {"activation": value("swiglu_oai"), "alpha": value(1e39)},
        "`alpha` must be finite in float32, got 1e+39",
    ),
    "limit_of_geglu": (
        {"activation": value("geglu"), "limit": value(7.0)},
        '`limit` must be None for the activation "geglu", got 7.0',
    ),
    "limit_0": ({"limit": value(0.0)}, "`limit` must be positive, got 0.0"),
    "limit_nan": ({"limit": value(float("nan"))}, "`limit` must be positive, got nan"),
    "routed_scale_nan": (
        {"routed_scale": value(float("nan"))},
        "`routed_scale` must be finite in float32, got nan",
    ),
    "routed_scale_infinite": (
        {"routed_scale": value(-float("inf"))},
        "`routed_scale` must be finite in float32, got -inf",
    ),
    "routed_scale_beyond_float32": (
        {"routed_scale": value(1e39)},
        "`routed_scale` must be finite in float32, got 1e+39",
    ),
    "gate_up_layout": (
        {"gate_up_layout": value("split")},
        '`gate_up_layout` must be one of "concatenated", "interleaved", got "split"',
    ),
    "layout_of_ungated": (
        {"activation": value("silu"), "gate_up_layout": value("interleaved")},
        '`gate_up_layout` must be "concatenated" (the default) for the activation "silu", which '
        'has no gate, got "interleaved"',
    ),
    "first_expert": (
        {"first_expert": value(-1)},
        "`first_expert` must be in [0, 2^31), got -1",
    ),
    "first_expert_with_a_map": (
        {"first_expert": value(1), "expert_map": ids(torch.int32, 8)},
        "`first_expert` must be 0 where `expert_map` is given, got 1",
    ),
    "map_dtype": (
        {"expert_map": ids(torch.int64, 8)},
        "`expert_map` must be int32, got int64",
    ),
    "map_shape": (
        {"expert_map": ids(torch.int32, 0)},
        "`expert_map` must have shape (num_global_experts,), at least (1,), got (0,)",
    ),
    "map_stride": (
        {"expert_map": lambda device: ids(torch.int32, 16)(device)[::2]},
        "`expert_map` must be contiguous, got stride 2",
    ),
    "addend_shape": (
        {"addend": bf16(TOKENS, INNER)},
        "`addend` must have shape (num_tokens, hidden) = (6, 160), got (6, 136)",
    ),
    "addend_strides": (
        {"addend": lambda device: bf16(1, HIDDEN)(device).expand(TOKENS, HIDDEN)},
        "`addend` must have a contiguous last dimension and its other strides at least 160 and "
        "multiples of 8 (16 bytes), got strides (0, 1) for shape (6, 160)",
    ),
    "accumulate": (
        {"accumulate": value("slow")},
        '`accumulate` must be "promoted" or "fast", got "slow"',
    ),
    "accumulate_of_bf16": (
        {"accumulate": value("fast")},
        '`accumulate` must be "promoted" (the default) with bfloat16 weights, which always '
        'accumulate in float32, got "fast"',
    ),
    "accumulate_of_blocks": (
        FP8_WEIGHTS | {"w2_scale": float32(EXPERTS, 2, 2), "accumulate": value("fast")},
        '`accumulate` must be "promoted" (the default) with scales per block, which every sum of '
        '128 is multiplied by, got "fast"',
    ),
    "workspace_size": (
        {"workspace": ids(torch.uint8, 100)},
        "`workspace` must have at least {size} bytes (fused_moe_workspace_size), got 100",
    ),
    "workspace_strides": (
        {"workspace": lambda device: ids(torch.uint8, 10**6)(device)[::2]},
        "`workspace` must be contiguous, got strides (2,) for shape (500000,)",
    ),
}
OUT_ERRORS = {
    "out_dtype": (
        {"out": float32(TOKENS, HIDDEN)},
        "`out` must be bfloat16 to match `hidden_states`, got float32",
    ),
    "out_shape": (
        {"out": bf16(TOKENS, INNER)},
        "`out` must have the shape (6, 160) of `hidden_states`, got (6, 136)",
    ),
    "out_strides": (
        {"out": lambda device: bf16(TOKENS, HIDDEN + 4)(device)[:, :HIDDEN]},
        "`out` must have a contiguous last dimension and its other strides at least 160 and "
        "multiples of 8 (16 bytes), got strides (164, 1) for shape (6, 160)",
    ),
}


def valid_arguments(device):
    made = {
        "hidden_states": bf16(TOKENS, HIDDEN),
        "w13": bf16(EXPERTS, 2 * INNER, HIDDEN),
        "w2": bf16(EXPERTS, HIDDEN, INNER),
        "topk_weights": float32(TOKENS, TOP_K),
        "topk_ids": ids(torch.int64, TOKENS, TOP_K),
    }
    return {name: make(device) for name, make in made.items()}


def workspace_size():
    return moe_ext.fused_moe_workspace_size(
        num_tokens=TOKENS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_experts=EXPERTS,
    )


def expect_error(arguments, message, op="fused_moe"):
    message = message.replace("{size}", str(workspace_size()))
    with pytest.raises(ValueError, match="^" + op + ": .*" + re.escape(message) + "$"):
        getattr(moe_ext, op)(**arguments)


@pytest.mark.parametrize("name", ERRORS)
def test_error(name, device):
    changes, message = ERRORS[name]
    changes = {argument: make(device) for argument, make in changes.items()}
    expect_error(valid_arguments(device) | changes, message)


@pytest.mark.parametrize("name", OUT_ERRORS)
def test_out_error(name, device):
    changes, message = OUT_ERRORS[name]
    changes = {argument: make(device) for argument, make in changes.items()}
    expect_error(valid_arguments(device) | changes, message, "fused_moe_out")


@pytest.mark.parametrize("name", ERRORS)
def test_fakes_are_checked_as_real_tensors_are(name):
    changes, message = ERRORS[name]
    changes = {argument: make("meta") for argument, make in changes.items()}
    expect_error(valid_arguments("meta") | changes, message)


def test_more_slots_than_are_sorted():
    arguments = valid_arguments("meta")
    arguments["hidden_states"] = bf16(2**21 + 1, HIDDEN)("meta")
    arguments["topk_ids"] = ids(torch.int32, 2**21 + 1, 2)("meta")
    expect_error(
        arguments,
        "`topk_ids` must have at most 4194304 elements, got 4194306 for shape (2097153, 2)",
    )


def test_a_misaligned_operand():
    arguments = valid_arguments("cpu")
    flat = torch.ones(TOKENS * HIDDEN + 4).bfloat16()
    arguments["hidden_states"] = flat[4:].view(TOKENS, HIDDEN)
    expect_error(
        arguments,
        "`hidden_states` must begin at a multiple of 16 bytes, got an address 8 bytes past one; "
        "moe_ext.pad_rows makes such a copy",
    )


OTHERS = {
    "w13_bias": float32(EXPERTS, 2 * INNER),
    "w2_bias": bf16(EXPERTS, HIDDEN),
    "a1_scale": float32(),
    "a2_scale": float32(1),
    "expert_map": ids(torch.int32, 8),
    "addend": bf16(TOKENS, HIDDEN),
    "workspace": ids(torch.uint8, 10**6),
    "out": bf16(TOKENS, HIDDEN),
}
EVERY_TENSOR = ("w13", "w2", "topk_weights", "topk_ids", "w13_scale", "w2_scale", *OTHERS)


def every_argument(device):
    made = FP8_WEIGHTS | OTHERS
    return valid_arguments(device) | {name: make(device) for name, make in made.items()}


@pytest.mark.parametrize("name", EVERY_TENSOR)
def test_a_tensor_on_another_device(name):
    arguments = every_argument("cpu")
    arguments[name] = arguments[name].to("meta")
    message = f"`{name}` must be on cpu, where `hidden_states` is, got meta"
    expect_error(arguments, message, "fused_moe_out")


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERY_TENSOR)
def test_a_cpu_tensor_beside_cuda_ones(name):
    arguments = every_argument("cuda")
    arguments[name] = arguments[name].cpu()
    message = f"`{name}` must be on cuda:0, where `hidden_states` is, got cpu"
    expect_error(arguments, message, "fused_moe_out")


def test_every_argument_together_is_fine():
    moe_ext.fused_moe_out(**every_argument("cpu"))


def test_a_refused_call_leaves_the_versions_of_what_it_would_write():
    arguments = every_argument("cpu") | {"limit": -1.0}
    before = arguments["out"]._version, arguments["workspace"]._version
    with pytest.raises(ValueError, match="`limit` must be positive, got -1"):
        moe_ext.fused_moe_out(**arguments)
    assert before == (arguments["out"]._version, arguments["workspace"]._version)


def test_the_op_itself_refuses_none():
    arguments = valid_arguments("cpu")
    op = torch.ops.moe_ext.fused_moe_out
    with pytest.raises((ValueError, RuntimeError), match="out"):
        op(**arguments, out=None)
