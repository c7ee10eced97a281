"""Every documented argument error of `fused_moe_masked`, of real tensors and of fakes."""

from __future__ import annotations

import re

import moe_ext
import pytest
import torch
from test_fused_moe_errors import ERRORS as LAYER_ERRORS
from test_fused_moe_errors import (
    EXPERTS,
    FP8_WEIGHTS,
    HIDDEN,
    INNER,
    bf16,
    float32,
    of,
    value,
)

ROWS = 3
BUFFERS = (EXPERTS, ROWS, HIDDEN)


def ints(*shape):
    return of(torch.int32, *shape)


# Those of `fused_moe` that have nothing to do with rows, the same to the word.
OF_ANY_LAYER = (
    "w13_dtype",
    "w2_dtype",
    "w2_transposed",
    "w13_of_an_ungated_layer",
    "w13_of_a_gated_layer",
    "w2_fp8_rows",
    "scale_of_bf16",
    "static_scale_of_bf16",
    "no_scale",
    "scale_dtype",
    "w13_scale_shape",
    "grids_of_interleaved_rows",
    "static_scale_with_blocks",
    "static_scale_shape",
    "w13_bias_shape",
    "w2_bias_dtype",
    "activation",
    "alpha_of_swiglu",
    "limit_0",
    "gate_up_layout",
    "accumulate",
    "accumulate_of_bf16",
)
ERRORS = {name: LAYER_ERRORS[name] for name in OF_ANY_LAYER} | {
    "hidden_dtype": (
        {"hidden_states": float32(*BUFFERS)},
        "`hidden_states` must be bfloat16, got float32",
    ),
    "hidden_rank": (
        {"hidden_states": bf16(EXPERTS * ROWS, HIDDEN)},
        "`hidden_states` must have shape (num_experts, max_rows, hidden), got (12, 160)",
    ),
    "hidden_experts": (
        {"hidden_states": bf16(EXPERTS + 1, ROWS, HIDDEN)},
        "`hidden_states` must have 4 experts to match `w13`, got shape (5, 3, 160)",
    ),
    "hidden_columns": (
        {"hidden_states": lambda device: bf16(EXPERTS, HIDDEN, ROWS)(device).mT},
        "`hidden_states` must have a contiguous last dimension and its other strides at least 160 "
        "and multiples of 8 (16 bytes), got strides (480, 1, 3) for shape (4, 3, 160)",
    ),
    "hidden_stride": (
        {"hidden_states": lambda device: bf16(EXPERTS, ROWS, HIDDEN + 4)(device)[..., :HIDDEN]},
        "`hidden_states` must have a contiguous last dimension and its other strides at least 160 "
        "and multiples of 8 (16 bytes), got strides (492, 164, 1) for shape (4, 3, 160)",
    ),
    "hidden_gaps": (
        {"hidden_states": lambda device: bf16(EXPERTS, ROWS + 1, HIDDEN)(device)[:, :ROWS]},
        "`hidden_states` must have experts that follow each other without a gap, 3 x 160 elements "
        "apart, got strides (640, 160, 1)",
    ),
    "no_experts": (
        {
            "hidden_states": bf16(0, ROWS, HIDDEN),
            "w13": bf16(0, 2 * INNER, HIDDEN),
            "w2": bf16(0, HIDDEN, INNER),
            "counts": ints(0),
        },
        "`w13` must have 1 to 4096 experts, got 0",
    ),
    "hidden_size": (
        {
            "hidden_states": bf16(EXPERTS, ROWS, 12),
            "w13": bf16(EXPERTS, 2 * INNER, 12),
            "w2": bf16(EXPERTS, 12, INNER),
        },
        "`hidden_states` must have a positive hidden size that is a multiple of 8, got 12",
    ),
    "counts_dtype": (
        {"counts": of(torch.int64, EXPERTS)},
        "`counts` must be int32, got int64",
    ),
    "counts_shape": (
        {"counts": ints(EXPERTS + 1)},
        "`counts` must have shape (num_experts,) = (4,) to match `w13`, got (5,)",
    ),
    "counts_rank": (
        {"counts": ints(EXPERTS, 1)},
        "`counts` must have shape (num_experts,) = (4,) to match `w13`, got (4, 1)",
    ),
    "counts_stride": (
        {"counts": lambda device: ints(2 * EXPERTS)(device)[::2]},
        "`counts` must be contiguous, got stride 2",
    ),
    "expected_rows": (
        {"expected_rows": value(-1)},
        "`expected_rows` must not be negative, got -1",
    ),
}
OUT_ERRORS = {
    "out_dtype": (
        {"out": float32(*BUFFERS)},
        "`out` must be bfloat16 to match `hidden_states`, got float32",
    ),
    "out_shape": (
        {"out": bf16(EXPERTS, ROWS, INNER)},
        "`out` must have the shape (4, 3, 160) of `hidden_states`, got (4, 3, 136)",
    ),
    "out_strides": (
        {"out": lambda device: bf16(EXPERTS, ROWS, HIDDEN + 4)(device)[..., :HIDDEN]},
        "`out` must have a contiguous last dimension and its other strides at least 160 and "
        "multiples of 8 (16 bytes), got strides (492, 164, 1) for shape (4, 3, 160)",
    ),
    "out_gaps": (
        {"out": lambda device: bf16(EXPERTS, ROWS + 1, HIDDEN)(device)[:, :ROWS]},
        "`out` must have experts that follow each other without a gap, 3 x 160 elements apart, got "
        "strides (640, 160, 1)",
    ),
}
OTHERS = {
    "w13_bias": float32(EXPERTS, 2 * INNER),
    "w2_bias": bf16(EXPERTS, HIDDEN),
    "a1_scale": float32(),
    "a2_scale": float32(1),
    "out": bf16(*BUFFERS),
}
EVERY_TENSOR = ("w13", "w2", "counts", "w13_scale", "w2_scale", *OTHERS)


def valid_arguments(device):
    made = {
        "hidden_states": bf16(*BUFFERS),
        "w13": bf16(EXPERTS, 2 * INNER, HIDDEN),
        "w2": bf16(EXPERTS, HIDDEN, INNER),
        "counts": ints(EXPERTS),
    }
    return {name: make(device) for name, make in made.items()}


def every_argument(device):
    made = FP8_WEIGHTS | OTHERS
    return valid_arguments(device) | {name: make(device) for name, make in made.items()}


def expect_error(arguments, message, op="fused_moe_masked"):
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
    expect_error(valid_arguments(device) | changes, message, "fused_moe_masked_out")


@pytest.mark.parametrize("name", [*ERRORS, *OUT_ERRORS])
def test_fakes_are_checked_as_real_tensors_are(name):
    changes, message = (ERRORS | OUT_ERRORS)[name]
    changes = {argument: make("meta") for argument, make in changes.items()}
    op = "fused_moe_masked_out" if "out" in changes else "fused_moe_masked"
    expect_error(valid_arguments("meta") | changes, message, op)


def test_more_rows_than_are_counted():
    arguments = valid_arguments("meta") | {"hidden_states": bf16(EXPERTS, 2**28, HIDDEN)("meta")}
    expect_error(
        arguments,
        "`hidden_states` must have at most 1073709055 rows in all for these sizes, got 1073741824",
    )


@pytest.mark.parametrize("name", ["hidden_states", "out"])
def test_a_misaligned_operand(name):
    arguments = every_argument("cpu")
    flat = torch.ones(EXPERTS * ROWS * HIDDEN + 4).bfloat16()
    arguments[name] = flat[4:].view(BUFFERS)
    message = f"`{name}` must begin at a multiple of 16 bytes, got an address 8 bytes past one"
    hint = "" if name == "out" else "; moe_ext.pad_rows makes such a copy"
    expect_error(arguments, message + hint, "fused_moe_masked_out")


@pytest.mark.parametrize("name", EVERY_TENSOR)
def test_a_tensor_on_another_device(name):
    arguments = every_argument("cpu")
    arguments[name] = arguments[name].to("meta")
    message = f"`{name}` must be on cpu, where `hidden_states` is, got meta"
    expect_error(arguments, message, "fused_moe_masked_out")


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERY_TENSOR)
def test_a_cpu_tensor_beside_cuda_ones(name):
    arguments = every_argument("cuda")
    arguments[name] = arguments[name].cpu()
    message = f"`{name}` must be on cuda:0, where `hidden_states` is, got cpu"
    expect_error(arguments, message, "fused_moe_masked_out")


def test_every_argument_together_is_fine(device):
    moe_ext.fused_moe_masked_out(**every_argument(device))


def test_a_refused_call_leaves_the_version_of_what_it_would_write():
    arguments = every_argument("cpu") | {"limit": -1.0}
    before = arguments["out"]._version
    with pytest.raises(ValueError, match="`limit` must be positive, got -1"):
        moe_ext.fused_moe_masked_out(**arguments)
    assert before == arguments["out"]._version
