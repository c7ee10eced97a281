"""Every documented argument error of `quantize_fp8`, the same on the CPU and on CUDA."""

from __future__ import annotations

import re

import moe_ext
import pytest
import torch

FP8 = torch.float8_e4m3fn
GROUPS, ROWS, K = 3, 6, 160


def int32(*shape):
    return lambda device: torch.ones(shape, dtype=torch.int32, device=device)


def float32(*shape):
    return lambda device: torch.ones(shape, device=device)


def fp8(*shape):
    return lambda device: torch.ones(shape, device=device).to(FP8)


def value(constant):
    return lambda device: constant


ERRORS = {
    "granularity": (
        {"granularity": value("block")},
        '`granularity` must be one of "tensor", "row", "1x128", "128x128", got "block"',
    ),
    "x_dtype": (
        {"x": lambda device: torch.ones(ROWS, K, device=device).double()},
        "`x` must be bfloat16, float16 or float32, got float64",
    ),
    "x_is_quantised_already": (
        {"x": fp8(ROWS, K)},
        "`x` must be bfloat16, float16 or float32, got float8_e4m3fn",
    ),
    "x_rank_1": (
        {"x": float32(K)},
        "`x` must have shape (rows, k) or (groups, rows, k), got (160,)",
    ),
    "x_rank_4": (
        {"x": float32(1, 1, ROWS, K)},
        "`x` must have shape (rows, k) or (groups, rows, k), got (1, 1, 6, 160)",
    ),
    "x_columns": (
        {"x": lambda device: torch.ones(K, ROWS, device=device).T},
        "`x` must have a contiguous last dimension, got strides (1, 6) for shape (6, 160)",
    ),
    "scale_with_blocks": (
        {"scale": float32(), "granularity": value("1x128")},
        '`scale` must be None for the granularity "1x128" (only "tensor" takes one), got shape ()',
    ),
    "scale_with_power_of_two": (
        {"scale": float32(), "power_of_two": value(True)},
        "`power_of_two` must be False where `scale` is given and used as it is, got True",
    ),
    "scale_dtype": (
        {"scale": lambda device: torch.ones((), device=device).double()},
        "`scale` must be float32, got float64",
    ),
    "scale_shape": (
        {"scale": float32(ROWS)},
        "`scale` must have shape () or (1,) for 2-D `x`, got (6,)",
    ),
    "scale_shape_of_groups": (
        {"x": float32(GROUPS, ROWS, K), "scale": float32()},
        "`scale` must have shape (groups,) = (3,) for 3-D `x`, got ()",
    ),
    "count_dtype": (
        {"num_valid_rows": lambda device: torch.ones((), dtype=torch.int64, device=device)},
        "`num_valid_rows` must be int32, got int64",
    ),
    "count_shape": (
        {"num_valid_rows": int32(2)},
        "`num_valid_rows` must have shape () or (1,) for 2-D `x`, got (2,)",
    ),
    "count_shape_of_groups": (
        {"x": float32(GROUPS, ROWS, K), "num_valid_rows": int32(2)},
        "`num_valid_rows` must have shape (groups,) = (3,) for 3-D `x`, got (2,)",
    ),
}
OUT_ERRORS = {
    "q_dtype": (
        {"q": lambda device: torch.ones(ROWS, K, device=device).to(torch.float8_e5m2)},
        "`q` must be float8_e4m3fn, got float8_e5m2",
    ),
    "q_shape": (
        {"q": fp8(ROWS, K + 1)},
        "`q` must have the shape (6, 160) of `x`, got (6, 161)",
    ),
    "q_columns": (
        {"q": lambda device: torch.ones(K, ROWS, device=device).to(FP8).T},
        "`q` must have a contiguous last dimension, got strides (1, 6) for shape (6, 160)",
    ),
    "q_rows_overlap": (
        {"q": lambda device: torch.ones(1, K, device=device).to(FP8).expand(ROWS, K)},
        "`q` must have strides of at least 160 between its rows, got strides (0, 1) for shape",
    ),
    "scale_out_dtype": (
        {"scale_out": lambda device: torch.ones((), device=device).bfloat16()},
        "`scale_out` must be float32, got bfloat16",
    ),
    "scale_out_shape": (
        {"scale_out": float32(ROWS, 1), "granularity": value("1x128")},
        '`scale_out` must have shape (6, 2) for the granularity "1x128", got (6, 1)',
    ),
}
CPU_TENSORS = ("q", "scale_out", "scale", "num_valid_rows")


def valid_arguments(device):
    return {"x": torch.ones(ROWS, K, device=device), "granularity": "tensor"}


def valid_outputs(device):
    return {"q": fp8(ROWS, K)(device), "scale_out": float32()(device)}


def expect_error(arguments, message, op="quantize_fp8"):
    with pytest.raises(ValueError, match="^" + op + ": .*" + re.escape(message)):
        getattr(torch.ops.moe_ext, op)(**arguments)


@pytest.mark.parametrize("name", ERRORS)
def test_error(name, device):
    changes, message = ERRORS[name]
    changes = {argument: make(device) for argument, make in changes.items()}
    expect_error(valid_arguments(device) | changes, message)


@pytest.mark.parametrize("name", OUT_ERRORS)
def test_out_error(name, device):
    changes, message = OUT_ERRORS[name]
    changes = {argument: make(device) for argument, make in changes.items()}
    arguments = valid_arguments(device) | valid_outputs(device) | changes
    expect_error(arguments, message, "quantize_fp8_out")


@pytest.mark.parametrize("name", ERRORS)
def test_fakes_are_checked_as_real_tensors_are(name):
    changes, message = ERRORS[name]
    changes = {argument: make("meta") for argument, make in changes.items()}
    expect_error(valid_arguments("meta") | changes, message)


def test_more_blocks_than_the_device_counts():
    x = torch.empty(1, 128, device="meta").expand(2**31, 128)
    expect_error(
        {"x": x, "granularity": "row"},
        "`x` must have at most 2147418111 blocks of 128 along k and sizes no larger, got "
        "2147483648 for shape (2147483648, 128)",
    )


@pytest.mark.parametrize("name", CPU_TENSORS)
def test_a_tensor_on_another_device(name):
    arguments = valid_arguments("cpu") | valid_outputs("cpu")
    arguments |= {"scale": torch.ones(()), "num_valid_rows": int32()("cpu")}
    arguments[name] = arguments[name].to("meta")
    message = f"`{name}` must be on cpu, where `x` is, got meta"
    expect_error(arguments, message, "quantize_fp8_out")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CPU_TENSORS)
def test_a_cpu_tensor_beside_cuda_ones(name):
    arguments = valid_arguments("cuda") | valid_outputs("cuda")
    arguments |= {"scale": torch.ones((), device="cuda"), "num_valid_rows": int32()("cuda")}
    arguments[name] = arguments[name].cpu()
    message = f"`{name}` must be on cuda:0, where `x` is, got cpu"
    expect_error(arguments, message, "quantize_fp8_out")


def test_a_refused_call_leaves_the_versions_of_its_outputs():
    outputs = valid_outputs("cpu")
    versions = [tensor._version for tensor in outputs.values()]
    with pytest.raises(ValueError, match="`q` must have the shape"):
        moe_ext.quantize_fp8_out(torch.ones(2, K), "tensor", **outputs)
    assert [tensor._version for tensor in outputs.values()] == versions
